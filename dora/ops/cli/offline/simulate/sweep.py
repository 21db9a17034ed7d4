"""``dora simulate sweep``"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dora.errors import InvalidValue, one_of
from dora.ops.cli import completion
from dora.ops.cli.exits import ExitCode
from dora.ops.cli.options import JsonOption, passed_options, refuse_options
from dora.ops.cli.output import print_json, progress_bar, stderr, stdout

if TYPE_CHECKING:
    from dora.lab.sim.faults.sweep import SweepReport

ALL = "all"
EXAMPLE = "dora simulate sweep --seeds 1000 --faults all"


def sweep(
    context: typer.Context,
    seeds: Annotated[int, typer.Option(min=1, help="Number of small clusters to try, one per seed.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    faults: Annotated[
        str, typer.Option(autocompletion=completion.faults, help="all, or kinds separated by commas: kill,hang,...")
    ] = "all",
    policy: Annotated[
        list[str] | None,
        typer.Option(autocompletion=completion.swept_policies, help="all, or one strategy; may be repeated."),
    ] = None,
    window: Annotated[
        str,
        typer.Option(metavar="drawn|auto", help="Window of each cluster: drawn from 1 to 4, or auto, which adapts."),
    ] = "drawn",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that run trials; by default one a core, for many seeds.")
    ] = None,
    replay: Annotated[str | None, typer.Option(metavar="TOKEN", help="Only this trial, as a failure names it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the real orchestrator core on small simulated clusters with faults, checking every guarantee after each
    event.

    The command exits with 1 after a violation, a lost or duplicated group, or a trainer that waits forever.
    """
    from dora.lab.sim.faults import sweep as sim
    from dora.lab.sim.faults.fault_kinds import KINDS
    from dora.orchestrator.plugins import load_strategies

    load_strategies()
    if replay is not None:
        ignored = [option for option in passed_options(context) if option not in ("--replay", "--json")]
        refuse_options(context, ignored, "with --replay, whose token defines the whole trial")
        trial, report = sim.replay(replay)
        if not as_json:
            for fault in trial.faults:
                drawn = f"(subject {fault.subject}, amount {fault.amount})"
                stdout().print(f"{fault.at_s:8.3f} s  {fault.kind}: {KINDS[fault.kind].meaning} {drawn}")
    else:
        report = _sweep(range(first, first + seeds), _known_policies(policy or [], window), faults, window, jobs)
    if as_json:
        print_json(asdict(report))
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(ExitCode.FAILED)


def _sweep(seeds: range, policies: list[str], faults: str, window: str, jobs: int | None) -> "SweepReport":
    from dora.lab.sim.faults.fault_kinds import kinds_of
    from dora.lab.sim.faults.sweep import sweep as run
    from dora.lab.sim.faults.trial_processes import processes_for

    kinds_of(faults)
    with progress_bar(stderr(), f"{len(seeds)} seeds under faults") as tell:
        return run(seeds, policies, faults, tell, jobs or processes_for(len(seeds)), window)


def _known_policies(names: list[str], window: str) -> list[str]:
    """The strategies to distribute over the seeds. Raises InvalidValue, suggesting the nearest name."""
    from dora.core.policies import POLICIES, allows_any
    from dora.lab.sim.faults.trial import DRAWN, WINDOWS

    if window not in WINDOWS:
        raise InvalidValue("--window", window, " or ".join(WINDOWS))
    known = [name for name in POLICIES if window == DRAWN or allows_any(name)]
    for name in names:
        if name not in (ALL, *known):
            raise InvalidValue("--policy", name, one_of(name, (ALL, *known)))
    return list(known if not names or ALL in names else dict.fromkeys(names))


def _show(report: "SweepReport") -> None:
    out = stdout()
    for failure in report.failures:
        out.print(f"{failure.kind} of seed {failure.seed} ({failure.policy}): {failure.message}", markup=False)
        out.print(f"  {failure.replay}", markup=False, soft_wrap=True)
    out.print(
        f"{report.seeds} seeds: {report.violations} violations, {report.lost} lost, {report.duplicated} duplicated, "
        f"{report.stalled} stalled",
        markup=False,
    )
