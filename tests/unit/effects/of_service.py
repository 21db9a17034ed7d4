"""The settings of the service itself: its folders, addresses and bounds, the record, and the user's functions."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import grpc

from dora.config import Config
from dora.core import events as on
from dora.data.run_record import CommittedStep
from dora.data.types import Prompt
from dora.errors import LimitExceeded
from dora.journal.log import DEFAULT_SIZES
from dora.models import made_model, resolve_model
from dora.orchestrator import scoring
from dora.orchestrator.recovery.state_folder import state_folder_of
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.services.server import _bound
from dora.orchestrator.setup import cache_of, recorder_of, run_folder_of, store_of, weight_versions
from dora.prompts.source import PromptSource
from dora.rewards import RewardRunner
from dora.rpc.roles import Role, ServiceTokens
from dora.system.log_lines import formatter_of
from tests.owner_token import owner_token
from tests.unit.effects.of_limits import passed_s
from tests.unit.effects.rows import Place, Row, Seen, Shown

FUNCTIONS: Final = "tests.unit.reward_functions"
LIMITS: Final = "tests.abuse.hostile_rewards:limits_seen"


def files(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*"))


def architecture(config: Config, place: Place) -> str:
    """Returns the architecture of the model that the service has prepared."""
    cache = place.folder / "cache"
    resolve_model(config.model, cache)
    return str(made_model(config.model, cache)).rpartition("/")[2]


def cached(config: Config, place: Place) -> bool:
    place.monkeypatch.setenv("XDG_CACHE_HOME", str(place.folder / "users"))
    resolve_model("tiny", cache_of(place.within(config, "cache")))
    return (place.folder / "own").exists()


async def recorded(config: Config, place: Place) -> list[str]:
    """The versions whose weights the record keeps after nine commits."""
    config = place.within(config, "record")
    (place.folder / "run").mkdir()
    store = store_of(place.folder / "run", place.model("dense"), config)
    async with contextlib.AsyncExitStack() as stack:
        recorder = await recorder_of(config, store, stack, False)
        if recorder is None:
            return []
        for version in range(1, 10):
            recorder.commit(
                CommittedStep(version - 1, version, {}, 1.0, weights=config.record_weights), store.folder(0)
            )
    return sorted(each.name for each in (Path(config.record) / "versions").iterdir())


def run_folder(config: Config, place: Place) -> str:
    with run_folder_of(place.within(config, "service.run_folder")) as folder:
        return folder.name


def state(config: Config, place: Place) -> list[str]:
    config = place.within(config, "service.state")
    with state_folder_of(config, DEFAULT_SIZES) as opened:
        if opened is None:
            return []
    return [name for name in files(place.folder) if name == "state/dora.lock"]


async def address(config: Config, _: Place) -> str:
    server = grpc.aio.server()
    try:
        return _bound(server, config).rpartition(":")[0]
    finally:
        await server.stop(None)


def log_line(config: Config, _: Place) -> bool:
    """Whether a line of the log is an object."""
    record = logging.makeLogRecord({"msg": "said"})
    return formatter_of(config.service.log_format).format(record).startswith("{")


def owner(config: Config, _: Place) -> str:
    """The token with which the service knows its owner."""
    return ServiceTokens(config.service.token).of[Role.OWNER]


def room(config: Config, _: Place) -> bool:
    """Whether a queue takes three prompts."""
    try:
        return PromptFeed(config, None).submit([Prompt(f"p{n}", "task", (1,)) for n in range(3)]) >= 0
    except LimitExceeded:
        return False


def ticks(config: Config, _: Place) -> int:
    """The ticks that the core gets in ten seconds."""
    posted: list[object] = []

    class Stopped(Exception): ...

    class Ticking:
        """A runtime without anything to look after."""

        def __init__(self) -> None:
            nothing: Any = lambda *_: None  # noqa: E731
            self.config = config
            self.core = SimpleNamespace(state=SimpleNamespace(workers={}), post=posted.append)
            self.sessions = type("Sessions", (), {"replace_silent": nothing})
            self.hosts = type("Hosts", (), {"look": nothing})
            self.telemetry = Telemetry()
            self.storage = type("Storage", (), {"tidying": lambda *_: contextlib.nullcontext()})
            self.durable_ends, self.fleet_advice = SimpleNamespace(settle=nothing), SimpleNamespace(look=nothing)
            self.sweep_snapshots = self._end_hopeless_step = nothing

        async def look_at_storage(self) -> None: ...

    async def for_ten_seconds() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10.001):
                await Runtime.ticks(Ticking())  # type: ignore[arg-type]

    passed_s(for_ten_seconds)
    return sum(isinstance(event, on.Tick) for event in posted)


def versions(config: Config, _: Place) -> int:
    """The versions that a host's store has room for."""
    return weight_versions(config)


@contextlib.asynccontextmanager
async def verifier(config: Config) -> AsyncIterator[RewardRunner]:
    async with scoring.verifying(
        config, PromptSource("none", "dora.rewards.tiny:score", lambda index: None), None
    ) as one:
        yield one


async def components(config: Config, _: Place) -> list[str]:
    """The parts of a verdict, which each function has of its own."""
    async with verifier(config) as one:
        return sorted((await one.score("DIGITS", "12", (1, 2), "{}")).components)


async def limits(config: Config, _: Place) -> dict[str, float]:
    async with verifier(config) as one:
        found = (await one.score("", "", (), "{}")).components
        return {name: value for name, value in found.items() if name != "process"}


async def processes_used(config: Config, _: Place) -> int:
    """By three calls, one after the other."""
    async with verifier(config) as one:
        return len({(await one.score("", "", (), "{}")).value for _call in range(3)})


async def at_once(config: Config, _: Place) -> int:
    """The processes of the verifier."""
    async with verifier(config) as one:
        found = await asyncio.gather(*(one.score("", "", (), "{}") for _call in range(64)))
        return len(one._workers) if all(each.valid for each in found) else 0


async def ended(config: Config, _: Place) -> bool:
    """Whether a call that hangs has ended within a second."""
    async with verifier(config) as one:
        call = asyncio.ensure_future(one.score("hang", "", (), "{}"))
        done, _waiting = await asyncio.wait([call], timeout=1.0)
        call.cancel()
        return bool(done)


async def waiting(config: Config, _: Place) -> int:
    """The responses that the verifier's queue takes of five that come at once."""
    async with verifier(config) as one:
        calls = [asyncio.ensure_future(one.score("hang", "", (), "{}")) for _call in range(5)]
        await asyncio.sleep(0)
        taken = one._jobs.qsize()
        for call in calls:
            call.cancel()
        return taken


async def surroundings(config: Config, place: Place) -> bool:
    """Whether the function sees a variable of the service's surroundings."""
    place.monkeypatch.setenv("MY_KEY", "1")
    async with verifier(config) as one:
        return "MY_KEY" in (await one.score("", "", (), '{"pipes": []}')).log


E2E: Final = "tests/e2e/"
ROTATED: Final = "tests/unit/test_token_rotation.py::test_a_service_and_its_clients_follow_their_files"
STARTED: Final = "tests/e2e/test_guarded_fake.py::test_a_service_takes_single_files_and_a_folder"
EVALUATION: Final = "tests/unit/test_evaluation.py::"

ROWS: Final[dict[str, Row]] = {
    "model": Seen("tiny-moe", architecture, base={"model": "tiny"}),
    "cache": Seen("own", cached, True),
    "record": Seen("record", recorded, [str(version) for version in range(10)]),
    "record_weights": Seen("every 4", recorded, ["0", "4", "8", "9"], {"record": "record"}),
    "rollout.reference_version": Seen(1, versions, 5),
    "service.listen": Seen("127.0.0.2:0", address, "127.0.0.2", {"service.listen": "127.0.0.1:0"}),
    "service.metrics": Shown(E2E + "test_metrics_fake.py::test_a_port_in_use_is_told_with_its_owner"),
    "service.log_format": Seen("json", log_line, True),
    "service.traces": Shown(E2E + "test_traces_fake.py::test_sessions_turns_handoffs_steps_and_publications_are_spans"),
    "service.traces_fraction": Shown(
        "tests/unit/test_traces.py::test_no_span_is_kept_of_a_session_that_is_not_sampled"
    ),
    "service.token": Seen(owner_token("seen"), owner, owner_token("seen")),
    "service.token_file": Shown(ROTATED),
    "service.token_overlap_s": Shown(ROTATED),
    "service.run_folder": Seen("mine", run_folder, "mine"),
    "service.state": Seen("state", state, ["state/dora.lock"]),
    "service.begin_from": Shown(E2E + "test_begin_from_fake.py::test_a_new_run_begins_with_a_version_of_another"),
    "service.carry_on_from": Shown(
        E2E + "test_copies_fake.py::test_an_older_state_beside_a_newer_record_trains_no_group_twice"
    ),
    "service.keep_events": Shown(E2E + "test_event_log.py::test_a_replay_ends_as_the_service_did"),
    "service.max_message_bytes": Shown(
        "tests/unit/test_feed.py::test_a_prompt_whose_response_fits_no_message_is_refused"
    ),
    "service.prompts_queued_max": Seen(2, room, False),
    "service.weight_versions": Shown(
        E2E + "test_service_fake.py::test_a_commit_is_refused_where_nothing_leaves_the_store"
    ),
    "service.evaluation_versions": Shown(EVALUATION + "test_so_many_versions_are_kept_and_no_more"),
    "service.tick_s": Seen(2.0, ticks, 5),
    "tls.folder": Shown(STARTED),
    "tls.cert": Shown(STARTED),
    "tls.key": Shown(STARTED),
    "tls.ca": Shown(STARTED),
    "tls.clients": Shown(E2E + "test_guarded_fake.py::test_clients_may_need_no_certificate"),
    "tls.domain": Shown(E2E + "test_guarded_fake.py::test_only_names_of_the_domain_give_roles"),
    "selection.filter": Shown("tests/abuse/test_rewards.py::test_the_settings_reach_reward_function_and_filter"),
    "reward.function": Seen(LIMITS, components, ["memory_mb", "open_files", "process"]),
    "reward.timeout_s": Seen(0.2, ended, True, {"reward.function": f"{FUNCTIONS}:misbehaves"}),
    "reward.workers": Seen(2, at_once, 2),
    "reward.queued_max": Seen(2, waiting, 2, {"reward.function": f"{FUNCTIONS}:misbehaves"}),
    "reward.environment": Seen(["MY_KEY"], surroundings, True, {"reward.function": f"{FUNCTIONS}:surroundings"}),
    "reward.memory_mb": Seen(512, limits, base={"reward.function": LIMITS}),
    "reward.open_files": Seen(100, limits, base={"reward.function": LIMITS}),
    "reward.processes": Shown("tests/abuse/test_rewards.py::test_a_leak_costs_no_verdict_and_each_call_is_judged_once"),
    "reward.calls_max": Seen(1, processes_used, 3, {"reward.function": f"{FUNCTIONS}:process_id"}),
}
