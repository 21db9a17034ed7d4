"""What the shell may complete: settings, models, prompts, functions, and what a running service has.

``dora --install-completion`` installs it. A completion is quick and silent: nothing heavy is imported, and a service
that does not answer at once completes nothing.
"""

import ast
import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

import typer

from dora.cli.token import DEFAULT_ADDRESS, find_token
from dora.errors import DoraError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dora.client import Operator

SERVICE_TIMEOUT_S: Final = 0.7
REQUESTS_MAX: Final = 200
MEANING_MAX: Final = 60  # characters
FILES_MAX: Final = 200  # of a folder, that are looked at
FILE_BYTES_MAX: Final = 1 << 20
REWARDS: Final = tuple(f"dora.rewards.{name}:score" for name in ("answer", "counting", "reasoning_gym", "tiny"))
REWARD_PARAMETERS: Final = 4
TASKS: Final = "reasoning-gym:"
TASK_NAME: Final = re.compile(r'^DATASET_NAME = "(\w+)"', re.MULTILINE)

Found = list[str | tuple[str, str]]  # a value, or a value with what it means


def service_settings(incomplete: str) -> Found:
    """``section.field=value`` of a service's configuration."""
    from dora.config import Config

    return _settings(Config, incomplete)


def scenario_settings(incomplete: str) -> Found:
    """``section.field=value`` of a scenario."""
    from dora.sim.scenario import Scenario

    return _settings(Scenario, incomplete)


def models(incomplete: str) -> Found:
    """The models with names of their own, and folders."""
    from dora.models import NAMES

    return [*NAMES, *(f"{folder}/" for folder in _beside(incomplete) if folder.is_dir())]


def kv_tiers(incomplete: str) -> Found:
    """What ``dora serve --kv-tier`` takes."""
    return ["none", "lmcache"]


def planned_models(incomplete: str) -> Found:
    """The models that ``dora plan`` knows."""
    from dora.planning.models import MODELS

    return list(MODELS)


def hardware(incomplete: str) -> Found:
    """The accelerators that ``dora plan`` knows."""
    from dora.planning.hardware import HARDWARE

    return list(HARDWARE)


def presets(incomplete: str) -> Found:
    """What ``dora simulate --preset`` takes."""
    from dora.sim.presets import NAMES

    return list(NAMES)


def policies(incomplete: str) -> Found:
    """The strategies of the simulator; a service has all but ``partial``."""
    from dora.orchestrator.plugins import load_strategies
    from dora.sim.partial import strategies

    with suppress(DoraError):  # what another package brings does not load
        load_strategies()
    return list(strategies())


def live_policies(incomplete: str) -> Found:
    """The strategies of a service."""
    from dora.core.policies import POLICIES
    from dora.orchestrator.plugins import load_strategies

    with suppress(DoraError):
        load_strategies()
    return list(POLICIES)


def swept_policies(incomplete: str) -> Found:
    """What ``dora simulate sweep --policy`` takes."""
    return ["all", *live_policies(incomplete)]


def predictors(incomplete: str) -> Found:
    """The predictors of response lengths."""
    from dora.config import BalanceConfig

    return list(get_args(BalanceConfig.model_fields["predictor"].annotation))


def faults(incomplete: str) -> Found:
    """The kinds of faults, each after those that stand there already."""
    from dora.sim.fault_kinds import KINDS

    before = incomplete[: incomplete.rfind(",") + 1]
    return [*([] if before else ["all"]), *((f"{before}{name}", kind.meaning) for name, kind in KINDS.items())]


def event_kinds(incomplete: str) -> Found:
    """The kinds of events and commands, each after those that stand there already."""
    from dora.orchestrator.recovery.replay import KINDS

    before = incomplete[: incomplete.rfind(",") + 1]
    return [f"{before}{kind}" for kind in KINDS]


def prompts(incomplete: str) -> Found:
    """The sources of prompts: names, tasks, and files beside what is there."""
    if incomplete.startswith(TASKS[0]) and TASKS.startswith(incomplete[: len(TASKS)]):
        before = incomplete[: incomplete.rfind(",") + 1] or TASKS
        return [f"{before}{task}" for task in _tasks()]
    files = [file for file in _beside(incomplete) if file.is_dir() or file.suffix in (".jsonl", ".parquet")]
    return ["counting", "tiny", "none", TASKS, *(f"{file}/" if file.is_dir() else str(file) for file in files)]


def rewards(incomplete: str) -> Found:
    """The built-in verifiers, and the functions of this folder's modules that take as many parameters as one does."""
    modules = [file for file in islice(sorted(Path().glob("*.py")), FILES_MAX) if file.stem.isidentifier()]
    return [*REWARDS, *(f"{file.stem}:{name}" for file in modules for name in _functions(file))]


def workers(context: typer.Context, incomplete: str) -> Found:
    """The workers of the service that the command is for."""

    async def ask(operator: "Operator") -> Found:
        status = await operator.status()
        return [(worker.worker_id, f"{worker.state}, v{worker.version}") for worker in status.workers]

    return _asked(context, ask)


def hosts(context: typer.Context, incomplete: str) -> Found:
    """The hosts of the service that the command is for."""

    async def ask(operator: "Operator") -> Found:
        status = await operator.status()
        return [(host.name, f"{host.state}, {host.workers_ready} of {host.workers} workers") for host in status.hosts]

    return _asked(context, ask)


def drained(context: typer.Context, incomplete: str) -> Found:
    """What may be drained: workers, and hosts."""
    return [*workers(context, incomplete), *hosts(context, incomplete)]


def ends(context: typer.Context, incomplete: str) -> Found:
    """The workers and the pools of the service that the command is for."""

    async def ask(operator: "Operator") -> Found:
        status = await operator.status()
        found: Found = [(worker.worker_id, f"{worker.state}, v{worker.version}") for worker in status.workers]
        return [*found, *((pool.pool_id, f"a pool, {pool.state}") for pool in status.pools)]

    return _asked(context, ask)


def requests(context: typer.Context, incomplete: str) -> Found:
    """The running and parked requests of the service that the command is for."""

    async def ask(operator: "Operator") -> Found:
        listed = [await operator.trajectories(state, REQUESTS_MAX) for state in ("running", "parked")]
        rows = [row for reply in listed for row in reply.trajectories]
        return [(row.trajectory_id, f"v{row.version} on {row.worker}") for row in rows]

    return _asked(context, ask)


# What the values of a setting are completed from, beside what its type says.
VALUES: Final[dict[str, Callable[[str], Found]]] = {
    "model": models,
    "prompts.source": prompts,
    "reward.function": rewards,
    "balance.policy": live_policies,
}


def _settings(model: "type[BaseModel]", incomplete: str) -> Found:
    """Names up to ``=``; the values too once a name is there, or only one is left."""
    fields = dict(_fields(model, ""))
    name, given, begun = incomplete.partition("=")
    named = [field for field in fields if field == name or (not given and field.startswith(name))]
    if len(named) != 1:
        return [(f"{field}=", _meaning(fields[field])) for field in named]
    field = named[0]
    whole = [] if given else [(f"{field}=", _meaning(fields[field]))]
    values = _values(field, fields[field], begun)
    pairs = (each if isinstance(each, tuple) else (each, "") for each in values)
    return [*whole, *((f"{field}={value}", meaning) for value, meaning in pairs)]


def _meaning(field: Any) -> str:
    """The first words of what a setting means: shells show them in one line."""
    return shorten((field.description or "").partition(";")[0], MEANING_MAX, placeholder="...")


def _fields(model: "type[BaseModel]", place: str) -> Iterator[tuple[str, Any]]:
    from dora.data.validation import kind_of, section_of

    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is None:
            yield f"{place}{name}", field
        elif get_origin(kind_of(field)) is not tuple:  # no elements of a list: their number is not known
            yield from _fields(section, f"{place}{name}.")


def _values(name: str, field: Any, incomplete: str) -> Found:
    from dora.data.validation import kind_of, words_of

    kind = kind_of(field)
    if name in VALUES:
        return VALUES[name](incomplete)
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    if kind is bool:
        return ["true", "false"]
    default = [(str(field.default), "the default")] if isinstance(field.default, int | float) else []
    return [*default, *words_of(field)]


def _tasks() -> list[str]:
    """The tasks of reasoning-gym, read from its files: to import it takes seconds."""
    package = find_spec("reasoning_gym")
    folders = package.submodule_search_locations if package is not None else None
    found: set[str] = set()
    for folder in folders or ():
        for file in Path(folder).rglob("*.py"):
            with suppress(OSError, UnicodeDecodeError):
                found.update(TASK_NAME.findall(file.read_text(encoding="utf-8")))
    return sorted(found - {"composite"})


def _functions(file: Path) -> Iterator[str]:
    """Functions of a module that a call with a reward's parameters fits. The module is not run."""
    with suppress(OSError, ValueError, SyntaxError, RecursionError):
        if file.stat().st_size > FILE_BYTES_MAX:
            return
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                takes = len(node.args.posonlyargs) + len(node.args.args)
                if node.args.vararg or takes - len(node.args.defaults) <= REWARD_PARAMETERS <= takes:
                    yield node.name


def _beside(incomplete: str) -> Iterable[Path]:
    """What is in the folder that a path being typed is in."""
    folder = Path(incomplete[: incomplete.rfind("/") + 1])
    with suppress(OSError):
        return islice(sorted(each for each in folder.iterdir() if not each.name.startswith(".")), FILES_MAX)
    return ()


def _asked(context: typer.Context, ask: "Callable[[Operator], Awaitable[Found]]") -> Found:
    """What a service answers; nothing where there is none, or it takes too long."""
    from dora.client import Operator

    address = str(context.params.get("address") or os.environ.get("DORA_ADDRESS") or DEFAULT_ADDRESS)
    token = str(context.params.get("token") or os.environ.get("DORA_TOKEN") or find_token(address))

    async def run() -> Found:
        async with asyncio.timeout(SERVICE_TIMEOUT_S), Operator(address, token=token) as operator:
            return await ask(operator)

    with suppress(DoraError, TimeoutError):
        return asyncio.run(run())
    return []
