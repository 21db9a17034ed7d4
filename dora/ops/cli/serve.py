"""``dora serve``"""

import asyncio
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dora.config import Config, load_config
from dora.ops.cli.exits import say
from dora.ops.cli.options import SettingsOption, check_no_secret
from dora.ops.cli.output import print_json
from dora.ops.cli.serve_options import (
    AttachJsonOption,
    BeginFromOption,
    CarryOnFromOption,
    ConfigFileOption,
    DeviceOption,
    DryRunOption,
    EnvironmentOption,
    GpusForTrainerOption,
    HttpKeyOption,
    HttpOption,
    KvTierOption,
    ListenOption,
    LogFormatOption,
    MetricsOption,
    ModelOption,
    OwnerTokenOption,
    PromptsOption,
    RecordOption,
    RecordWeightsOption,
    RewardOption,
    StateOption,
    TlsCaOption,
    TlsCertOption,
    TlsClientsOption,
    TlsKeyOption,
    TlsOption,
    TracesOption,
    WindowOption,
    WorkersOption,
    short_options,
)
from dora.ops.stored_token import left_token, token_folder
from dora.system.log_limit import LogLimit
from dora.system.log_lines import JsonLines, formatter_of
from dora.system.signals import drain_on_signals

if TYPE_CHECKING:
    from dora.agents.environment.child import EnvironmentProcess
    from dora.agents.front.child import FrontProcess
    from dora.orchestrator.main import ServiceHandle

EXAMPLE = "dora serve --window 2 --workers 2 --model smollm2 --record out/record"

TOKEN_NOT_LEFT = "cannot store the token for commands, because no folder for it is writable; set DORA_TOKEN for them"
ATTACH = """\
dora is serving {model} on {address}: window {window}, {workers} workers.
Weights: {versions}.
{ends}{tls}

  export DORA_TOKEN={token}
  dora watch --address {address}

{trainer}That is the owner's token: it may do all that follows. For those who are to do one thing only:

{roles}

  import os, dora.sync
  token = os.environ["DORA_TOKEN"]
  with dora.sync.Trainer("{address}", token=token) as trainer:
      for step in trainer.steps(groups={groups}):
          for group in step:
              ...
          step.commit(weights=model)
"""

TRAINER = """\
The reference trainer, on the GPUs that no worker has:

  {command}

"""
GUARDED = "\nIt is under TLS: clients need --tls DIR, or DORA_TLS=DIR, with a certificate of the same authority."
DRAINS = "Ctrl-C drains and stops."
CARRIES_ON = "Ctrl-C stops without draining; the next start with --state {state} carries on."


def serve(
    context: typer.Context,
    config_file: ConfigFileOption = None,
    settings: SettingsOption = None,
    window: WindowOption = None,
    workers: WorkersOption = None,
    model: ModelOption = None,
    prompts: PromptsOption = None,
    reward: RewardOption = None,
    record: RecordOption = None,
    record_weights: RecordWeightsOption = None,
    state: StateOption = None,
    begin_from: BeginFromOption = None,
    device: DeviceOption = None,
    gpus_for_trainer: GpusForTrainerOption = None,
    carry_on_from: CarryOnFromOption = None,
    kv_tier: KvTierOption = None,
    listen: ListenOption = None,
    metrics: MetricsOption = None,
    log_format: LogFormatOption = None,
    traces: TracesOption = None,
    environment: EnvironmentOption = None,
    http: HttpOption = None,
    http_key: HttpKeyOption = None,
    token: OwnerTokenOption = None,
    tls: TlsOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_ca: TlsCaOption = None,
    tls_clients: TlsClientsOption = None,
    dry_run: DryRunOption = False,
    as_json: AttachJsonOption = False,
) -> None:
    """Start the rollout service: orchestrator and workers, until Ctrl-C or SIGTERM.

    Options override --set, which overrides the file, which overrides the defaults.
    """
    check_no_secret(settings)
    config = load_config(config_file, [*(settings or ()), *short_options(context)])
    front = None if http is None else _front(http, http_key, config)
    if not dry_run:
        try:
            code = asyncio.run(_serve(config, as_json, front))
        except asyncio.CancelledError:  # by a second Ctrl-C
            raise KeyboardInterrupt from None
        raise typer.Exit(code)
    from dora.ops.view.settings import shown, toml_of

    if front is not None:
        front.close()
    _environment(config)
    _run_preflight(config)
    if as_json:
        print_json(shown(config))
    else:
        sys.stdout.write(toml_of(config))


def _front(listen: str, key_file: Path | None, config: Config) -> "FrontProcess":
    from dora.agents.front.child import FrontProcess
    from dora.orchestrator.guard import tls_of_children

    return FrontProcess(listen, key_file, tls_of_children(config), config.tls.clients)


def _environment(config: Config) -> "EnvironmentProcess | None":
    from dora.agents.environment.child import EnvironmentProcess
    from dora.orchestrator.guard import tls_of_children

    if not config.environment.spec:
        return None
    return EnvironmentProcess(config.environment, config.reward.environment, tls_of_children(config))


def _run_preflight(config: Config) -> None:
    from dora.orchestrator.preflight import run_preflight

    asyncio.run(run_preflight(config, lambda what, found: _print_progress(f"checked {what}: {found}")))
    if token_folder() is None:
        _print_progress(TOKEN_NOT_LEFT)
    _print_progress("The configuration is valid. (No engine was started.)")


async def _serve(config: Config, as_json: bool, front: "FrontProcess | None" = None) -> int:
    from dora.orchestrator.main import serve as run_service
    from dora.rpc.roles import Role

    environment = _environment(config)
    stop = asyncio.Event()
    _stop_on_signals(stop)
    limit, handler, lines = LogLimit(), logging.StreamHandler(), formatter_of(config.service.log_format)
    handler.addFilter(limit)
    handler.setFormatter(lines)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("dora").setLevel(logging.INFO)
    has_folder = token_folder() is not None
    if not has_folder:  # report it before the workers start
        _print_progress(TOKEN_NOT_LEFT)
    with ExitStack() as until_end:
        left = until_end.enter_context(ExitStack())

        def leave(handle: "ServiceHandle") -> None:
            left.close()
            if left.enter_context(left_token(handle.address, handle.token)) is None and has_folder:
                _print_progress("cannot store the token for commands; set DORA_TOKEN for them")

        def ready(handle: "ServiceHandle") -> None:
            leave(handle)
            _print_attach(handle, config, as_json)
            if front is not None:
                tokens = handle.tokens
                front.start(handle.address, tokens[Role.ENVIRONMENT], handle.model, tokens[Role.METRICS])
                _print_progress(f"agents reach it at {front.url}/v1; the operator's page is {front.url}/")
            if environment is not None:
                environment.start(handle.address, handle.tokens[Role.ENVIRONMENT], handle.model)

        telling = asyncio.create_task(limit.telling())
        until_end.callback(telling.cancel)
        until_end.callback(limit.tell)

        def listening(handle: "ServiceHandle") -> None:
            if isinstance(lines, JsonLines):
                lines.position = handle.position

        try:
            return await run_service(
                config, ready=ready, stop=stop, progress=_print_progress, listening=listening, rotated=leave
            )
        finally:
            if environment is not None:
                await environment.stop()
            if front is not None:
                await front.stop()


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first signal drains the service. A Ctrl-C that follows cancels it: what it started ends, folders go."""
    running = asyncio.current_task()
    assert running is not None

    def drain() -> None:
        stop.set()
        _print_progress("stopping; press Ctrl-C again to end at once")

    drain_on_signals(drain, running.cancel)


def _print_attach(handle: "ServiceHandle", config: Config, as_json: bool) -> None:
    from dora.orchestrator.device_sizes import placement_for, trainer_command
    from dora.orchestrator.guard import tls_of

    command, file = trainer_command(placement_for(config.workers), handle.address), config.service.token_file
    if as_json:
        print_json(
            {
                "address": handle.address,
                "token": handle.token,
                "tokens": others(handle),
                "model": str(handle.model),
                "run_folder": str(handle.run_folder),
                "metrics": handle.metrics,
                **({"trainer": command} if command else {}),
            }
        )
    else:
        sys.stdout.write(
            ATTACH.format(
                address=handle.address,
                token=f"$(cat {file})" if file else handle.token,
                tls=GUARDED if tls_of(config) is not None else "",
                ends=CARRIES_ON.format(state=config.service.state) if config.service.state else DRAINS,
                trainer=TRAINER.format(command=command) if command else "",
                roles="\n".join(
                    f"  {role:<10} {'dora token ' + role if file else token}" for role, token in others(handle).items()
                ),
                model=config.service.begin_from or config.model,
                window=config.window.size,
                workers=config.workers.count,
                versions=handle.versions or "their size is not known",
                groups=config.window.groups_per_step or 16,
            )
        )
    sys.stdout.flush()


def others(handle: "ServiceHandle") -> dict[str, str]:
    """Returns the tokens by role, except the owner's."""
    return {str(role): token for role, token in handle.tokens.items() if token != handle.token}


def _print_progress(line: str) -> None:
    say(f"dora: {line}")
