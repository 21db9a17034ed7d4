"""``dora demo``"""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dora.ops.cli import completion
from dora.ops.cli.exits import ExitCode
from dora.ops.cli.options import WINDOW_METAVAR, JsonOption, SettingsOption, check_no_secret, window_size
from dora.ops.cli.output import print_json, stderr, stdout
from dora.system.signals import drain_on_signals
from dora.tls.files import FOLDER_VARIABLE, VARIABLES

if TYPE_CHECKING:
    from dora.ops.demo.folder import OutFolder
    from dora.ops.demo.options import DemoOptions
    from dora.ops.demo.report import DemoReport
    from dora.ops.demo.screen import Screen

EXAMPLE = "dora demo --model tiny --steps 60"


def demo(
    model: Annotated[
        str,
        typer.Option(
            autocompletion=completion.models,
            help="smollm2, tiny, tiny-moe, tiny-hybrid, or the path of a Hugging Face folder.",
        ),
    ] = "smollm2",
    agent: Annotated[
        bool,
        typer.Option(
            "--agent",
            metavar="",
            help="Train sessions of several turns with a tool, in an environment (`dora.ops.demo.agent_tasks`).",
        ),
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    groups: Annotated[int | None, typer.Option(help="Prompt groups a step.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Responses per prompt.")] = None,
    window: Annotated[
        str | None, typer.Option(metavar=WINDOW_METAVAR, help="Maximum number of live policy versions; auto adapts it.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Rollout workers.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest response.")] = None,
    speculation: Annotated[
        str | None,
        typer.Option(
            help="Drafts: off, history, ngram or model:DIR (workers.speculation); the same tokens in fewer steps."
        ),
    ] = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", help="The trainer's learning rate.")] = None,
    replay_share: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the groups trained on, those of earlier steps; at most 0.5.")
    ] = 0.0,
    replay_by: Annotated[
        Literal["age", "priority"],
        typer.Option(help="Replay the newest versions first, or the largest mean absolute advantages."),
    ] = "age",
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="Evaluate each so-many-th version on 8 prompts that are not trained on; 0: none. [default: a quarter "
            "of the steps]",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for prompts and sampling.")] = 0,
    settings: SettingsOption = None,
    out: Annotated[Path, typer.Option(help="Folder for report, timeline, series and run record.")] = Path("out/demo"),
    kill_worker_after_s: Annotated[
        float | None,
        typer.Option(
            "--kill-worker-after", metavar="SECONDS", help="Kill one worker (SIGKILL) after this time. Nothing is lost."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve, train and watch in one terminal. The final summary compares each guarantee with its measurement.

    Options that are not given take the values of the model's preset. The command exits with 1 if a group was lost or
    delivered twice, a trajectory mixed versions, staleness exceeded its bound, the service's counters and the run
    record disagree, or no worker could be killed as asked.
    """
    from dora.ops.demo.folder import OutFolder
    from dora.ops.demo.options import DemoOptions
    from dora.ops.demo.screen import screen_for
    from dora.ops.demo.summary import print_summary

    check_no_secret(settings)
    for variable in (FOLDER_VARIABLE, *VARIABLES.values()):  # its own service listens on loopback, in the clear
        os.environ.pop(variable, None)
    options = DemoOptions(
        model=model,
        is_agent=agent,
        out=out,
        steps=steps,
        groups=groups,
        group_size=group_size,
        window=window_size(window),
        workers=workers,
        max_tokens=max_tokens,
        speculation=speculation,
        learning_rate=learning_rate,
        replay_share=replay_share,
        replay_by=replay_by,
        evaluate_every=evaluate_every,
        seed=seed,
        settings=tuple(settings or ()),
        kill_worker_after_s=kill_worker_after_s,
    )
    console = stderr() if as_json else stdout()
    folder = OutFolder(out)
    with screen_for(console, f"dora demo --model {model}{' --agent' * agent}", options.steps_planned) as screen:
        try:
            report = asyncio.run(_run(options, folder, screen))
        except asyncio.CancelledError:  # by a signal
            raise KeyboardInterrupt from None
    if as_json:
        print_json(report)
    else:
        print_summary(console, report, folder)
    if report["failures"] or report["not_done"]:
        raise typer.Exit(ExitCode.FAILED)


async def _run(options: "DemoOptions", folder: "OutFolder", screen: "Screen") -> "DemoReport":
    """Each signal that drains a service ends the demo like Ctrl-C: the trainer stops and the service drains."""
    from dora.ops.demo.run import run_demo

    running = asyncio.current_task()
    assert running is not None

    def end() -> None:
        running.cancel()

    drain_on_signals(end, end)
    return await run_demo(options, folder, screen)
