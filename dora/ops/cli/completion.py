"""Values for typer's shell completion: settings, models, strategies, and the workers of a running service.

``dora --install-completion`` installs it. typer filters the values by the typed text. A service that does not answer at
once adds no values.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

import typer

from dora.errors import DoraError, InvalidValue
from dora.ops.stored_token import DEFAULT_ADDRESS, secret_for
from dora.system.secret_file import read_token

if TYPE_CHECKING:
    from pydantic import BaseModel

SERVICE_TIMEOUT_S: Final = 0.7
REQUESTS_MAX: Final = 200
PROMPTS: Final = ("counting", "tiny", "tiny-tail", "tasks", "none", "reasoning-gym:")
REWARDS: Final = tuple(f"dora.rewards.{name}:score" for name in ("answer", "counting", "reasoning_gym", "tiny"))
KV_TIERS: Final = ("none", "lmcache")

Values = list[str] | list[tuple[str, str]]  # a value, or a value and its description


def service_settings(incomplete: str) -> list[str]:
    from dora.config import Config

    return _settings(Config, incomplete)


def scenario_settings(incomplete: str) -> list[str]:
    from dora.lab.sim.scenario import Scenario

    return _settings(Scenario, incomplete)


def models() -> list[str]:
    from dora.models import NAMES

    return list(NAMES)


def planned_models() -> list[str]:
    from dora.lab.planning.models import MODELS

    return list(MODELS)


def hardware() -> list[str]:
    from dora.data.hardware import HARDWARE

    return list(HARDWARE)


def presets() -> list[str]:
    from dora.lab.sim.presets import NAMES

    return list(NAMES)


def policies() -> list[str]:
    """The strategies that a service accepts, including those of other packages."""
    from dora.core.policies import POLICIES
    from dora.orchestrator.plugins import load_strategies

    with suppress(DoraError):  # another package's strategy fails to load
        load_strategies()
    return list(POLICIES)


def simulated_policies() -> list[str]:
    return [*policies(), "partial"]


def swept_policies() -> list[str]:
    return ["all", *policies()]


def predictors() -> list[str]:
    from dora.config import BalanceConfig

    return list(get_args(BalanceConfig.model_fields["predictor"].annotation))


def faults(incomplete: str) -> Values:
    from dora.lab.sim.faults.fault_kinds import KINDS

    typed = incomplete[: incomplete.rfind(",") + 1]
    return [("all", "every kind"), *((f"{typed}{name}", kind.meaning) for name, kind in KINDS.items())]


def event_kinds(incomplete: str) -> list[str]:
    from dora.orchestrator.recovery.replay import KINDS

    typed = incomplete[: incomplete.rfind(",") + 1]
    return [f"{typed}{kind}" for kind in KINDS]


def workers(context: typer.Context) -> Values:
    return _served(context, "worker")


def hosts(context: typer.Context) -> Values:
    return _served(context, "host")


def drained(context: typer.Context) -> Values:
    return _served(context, "worker", "host")


def ends(context: typer.Context) -> Values:
    return _served(context, "worker", "pool")


def requests(context: typer.Context) -> Values:
    return _served(context, "request")


def _settings(model: "type[BaseModel]", incomplete: str) -> list[str]:
    fields = dict(_fields(model, ""))
    typed = incomplete.partition("=")[0]
    names = [typed] if typed in fields else [name for name in fields if name.startswith(typed)]
    values = [f"{names[0]}={value}" for value in _values(names[0], fields[names[0]])] if len(names) == 1 else []
    return [*(f"{name}=" for name in names if f"{name}=" != incomplete), *values]


def _fields(model: "type[BaseModel]", prefix: str) -> Iterator[tuple[str, Any]]:
    from dora.data.validation import kind_of, section_of

    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is None:
            yield f"{prefix}{name}", field
        elif get_origin(kind_of(field)) is not tuple:  # the length of a list is unknown
            yield from _fields(section, f"{prefix}{name}.")


def _values(name: str, field: Any) -> list[str]:
    from dora.data.validation import kind_of, words_of

    kind = kind_of(field)
    if name in ("model", "balance.policy"):
        return models() if name == "model" else policies()
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    if kind is bool:
        return ["true", "false"]
    return [*([str(field.default)] if isinstance(field.default, int | float) else []), *words_of(field)]


def _served(context: typer.Context, *kinds: Literal["worker", "host", "pool", "request"]) -> Values:
    from dora.client import Operator

    address = str(context.params.get("address") or os.environ.get("DORA_ADDRESS") or DEFAULT_ADDRESS)
    token = os.environ.get("DORA_TOKEN") or secret_for(address)
    if (file := context.params.get("token")) and file != token:  # --token-file
        try:
            token = read_token(Path(str(file)))
        except InvalidValue:
            return []

    async def ask() -> Values:
        async with asyncio.timeout(SERVICE_TIMEOUT_S), Operator(address, token=token) as operator:
            if "request" in kinds:
                replies = [await operator.trajectories(state, REQUESTS_MAX) for state in ("running", "parked")]
                return [(row.trajectory_id, row.worker) for reply in replies for row in reply.trajectories]
            status = await operator.status()
        found = {
            "worker": [(worker.worker_id, worker.state) for worker in status.workers],
            "host": [(host.name, host.state) for host in status.hosts],
            "pool": [(pool.pool_id, pool.state) for pool in status.pools],
        }
        return [each for kind in kinds for each in found[kind]]

    with suppress(DoraError, TimeoutError):
        return asyncio.run(ask())
    return []
