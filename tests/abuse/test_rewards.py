"""Whatever a reward function does, its own verdicts fail at most: none is another call's, and nothing of it is left."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import select
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import pytest_asyncio

import dora
from dora.data.types import Reward
from dora.data.verdict import COMPONENTS_MAX, LOG_MAX_BYTES, NAME_MAX_BYTES
from dora.errors import InvalidValue
from dora.rewards import FilterRunner, RewardRunner, frames
from dora.rewards.limits import CALLS_A_LOOK, UserLimits
from dora.rewards.running_time import SLICE_S, RunningTime
from dora.rewards.verdict import reward_of, verdict
from dora.rpc import dora_pb2 as pb
from dora.system.process_tree import descendants
from tests.abuse import hostile_rewards
from tests.refusals import data_words, refused
from tests.service import check_promises, configured, running, train
from tests.sweeps import counts_of, full, some_of

FUNCTIONS = "tests.abuse.hostile_rewards"
Start = Callable[..., Awaitable[RewardRunner]]
ENDS_S = 20.0  # a process that is killed has ended by then, on a busy machine too


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Starts runners for functions of FUNCTIONS and closes them at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def started(function: str, **options: Any) -> RewardRunner:
            runner = await RewardRunner.start(f"{FUNCTIONS}:{function}", **options)
            stack.push_async_callback(runner.close)
            return runner

        yield started


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[tuple[str, Callable[[], bool]]]:
    """A named pipe, and whether all who held its other end have ended."""
    path = tmp_path / "alive"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(reading, select.POLLIN)  # tells once the last writer has gone
    yield str(path), lambda: bool(poll.poll(1e3 * ENDS_S))
    os.close(reading)


# ------------------------------------------------------------------------------------------------- whose verdict it is


@pytest.mark.parametrize("how", some_of(("os", "libc", "multiprocessing", "twice"), "os"))
async def test_what_a_function_forks_answers_no_call(start: Start, how: str) -> None:
    runner = await start("forks")
    calls = (runner.score(how, "", [], json.dumps({"reward": float(number)})) for number in range(8))
    assert await asyncio.gather(*calls) == [Reward(float(number)) for number in range(8)]


@pytest.mark.parametrize("what", some_of(("junk", "long", "half"), "junk"))
async def test_what_is_written_beside_the_verdict_is_no_verdict(start: Start, what: str) -> None:
    runner = await start("writes_everywhere", timeout_s=2.0)
    bad = await runner.score(what, "", [], "{}")
    assert not bad.valid and ("wrote into the answers" in bad.log or "took longer" in bad.log)
    assert await runner.score("", "", [], "{}") == Reward(1.0)


async def test_a_function_that_closes_its_pipes_fails_and_the_next_call_works(start: Start) -> None:
    runner = await start("closes_everything", timeout_s=5.0)
    bad = await runner.score("close", "", [], "{}")
    assert not bad.valid and "ended its process" in bad.log
    assert await runner.score("", "", [], "{}") == Reward(1.0)


async def test_a_function_that_kills_its_keeper_fails_and_the_next_call_works(start: Start, alive: Any) -> None:
    path, ended = alive
    runner = await start("kills_its_parent")
    bad = await runner.score("kill", "", [], json.dumps({"alive": path}))
    assert not bad.valid and "ended its keeper (exit code -9)" in bad.log and ended()
    assert await runner.score("", "", [], "{}") == Reward(1.0)


async def test_a_process_that_ends_between_calls_is_replaced(start: Start) -> None:
    runner = await start("verdict_then_ends")
    rewards = [await runner.score("", "", [], "{}") for _ in range(4)]
    assert all(reward.valid or "ended its process" in reward.log for reward in rewards)


def test_what_a_keeper_reads_is_one_map_of_bounded_size() -> None:
    whole = frames.encode({"reward": 1.0})
    assert [frames.first(whole[:cut], 64) for cut in range(len(whole))] == [None] * len(whole)
    assert frames.first(whole, 64) == {"reward": 1.0}
    no_map, no_msgpack = b"\x01\0\0\0\x05", b"\x01\0\0\0\xc1"
    for wrong in (b"\xff\xff\xff\x7f", whole + b"x", frames.encode({"a": "x" * 99}), no_map, no_msgpack):
        with pytest.raises(ValueError):
            frames.first(wrong, 64)


# ------------------------------------------------------------------------------------------------ what it leaves behind


async def test_what_a_function_has_started_ends_with_the_service(start: Start, alive: Any) -> None:
    path, ended = alive
    runner = await start("leaves_behind")
    assert (await runner.score("", "", [], json.dumps({"alive": path}))).valid
    await runner.close()
    assert ended()


async def test_a_start_that_is_closed_at_once_leaves_no_process() -> None:
    """As ``dora serve --dry-run`` does, and a service that fails while it starts."""
    before = set(descendants())
    await (await RewardRunner.start("dora.rewards.tiny:score", workers=2)).close()
    assert set(descendants()) <= before


async def test_what_a_function_has_started_ends_with_a_call_that_takes_too_long(start: Start, alive: Any) -> None:
    path, ended = alive
    runner = await start("leaves_behind", timeout_s=3.0)
    assert "took longer" in (await runner.score("hang", "", [], json.dumps({"alive": path}))).log
    assert ended()


# ------------------------------------------------------------------------------------------------------- what it uses

LOW = UserLimits(memory_mb=256, open_files=64, processes=32)


async def test_what_a_function_leaves_behind_is_bounded(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    runner = await start("never_waits")
    rewards = [await runner.score("", "", [], "{}") for _ in range(CALLS_A_LOOK + 1)]
    assert rewards == [Reward(1.0)] * len(rewards)
    await runner.close()
    assert f"has left {5 * CALLS_A_LOOK} processes behind" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("leak", "limit", "together"),
    [
        ("objects", "reward.memory_mb", True),
        ("files", "reward.open_files", True),
        ("children", "reward.processes", True),
        *full(
            ("untouched", "reward.memory_mb", False),
            ("shared", "reward.memory_mb", False),
            ("threads", "reward.memory_mb", False),
            ("memory of children", "reward.memory_mb", False),
            ("sockets", "reward.open_files", False),
        ),
    ],
)
async def test_a_leak_costs_no_verdict_and_each_call_is_judged_once(
    start: Start, leak: str, limit: str, together: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = dataclasses.replace(LOW, processes=256) if leak == "memory of children" else LOW
    runner, judged = await start("leaks", limits=limits), tmp_path / "judged"
    calls = range(2 * CALLS_A_LOOK + 2 if "children" in leak else 70)
    verifiers = [json.dumps({"reward": number, "judged": str(judged)}) for number in calls]
    if together:
        rewards = await asyncio.gather(*(runner.score(leak, "", [], verifier) for verifier in verifiers))
    else:
        rewards = [await runner.score(leak, "", [], verifier) for verifier in verifiers]
    await runner.close()
    assert rewards == [Reward(float(number)) for number in calls]
    assert [int(number) for number in judged.read_text().split()] == list(calls)
    log = capfd.readouterr().err
    assert limit in log and log.count("its process is replaced") >= 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("bytes", "raised MemoryError:; the limit is reward.memory_mb = 256"),
        ("shared", "MiB of reward.memory_mb = 256"),
        ("files", "Too many open files: '/dev/null'; the limit is reward.open_files = 64"),
        ("children", "processes behind, more than reward.processes = 32"),
        *full(
            ("numpy", "MiB for an array with shape"),
            ("small objects", "; the limit is reward.memory_mb = 256"),
            ("caught", "raised ValueError: no reward; the limit is reward.memory_mb = 256"),
            ("quoted", "raised RuntimeError: child: Cannot allocate memory; the limit is reward.memory_mb = 256"),
            ("long error", "xxx; the limit is reward.memory_mb = 256"),
            ("shared and prints", "MiB of reward.memory_mb = 256"),
            ("memory of children", "MiB of reward.memory_mb = 256"),
        ),
    ],
)
async def test_a_call_that_needs_too_much_names_the_limit(start: Start, what: str, message: str) -> None:
    runner = await start("takes", limits=LOW, timeout_s=60.0)
    bad = await runner.score(what, "", [], "{}")
    assert not bad.valid and message in bad.log and "reward." in bad.log
    assert await runner.score("nothing", "", [], "{}") == Reward(1.0)


async def test_calls_beside_one_that_needs_too_much_are_judged(start: Start) -> None:
    runner = await start("takes", limits=LOW)
    await asyncio.gather(*(runner.score("nothing", "", [], "{}") for _ in range(32)))
    whats = ["nothing", "bytes", "nothing", "files", "files", "nothing"]
    rewards = await asyncio.gather(*(runner.score(what, "", [], "{}") for what in whats))
    assert [reward.valid for reward in rewards] == [what == "nothing" for what in whats]


@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.full)])
async def test_a_process_is_replaced_after_so_many_calls(start: Start, together: bool) -> None:
    runner = await start("limits_seen", limits=dataclasses.replace(LOW, calls_max=3))
    if together:
        rewards = await asyncio.gather(*(runner.score("", "", [], "{}") for _ in range(10)))
    else:
        rewards = [await runner.score("", "", [], "{}") for _ in range(10)]
    processes = [reward.components["process"] for reward in rewards]
    assert [processes.count(each) for each in dict.fromkeys(processes)] == [3, 3, 3, 1]


async def test_a_filter_that_leaks_or_needs_too_much_keeps_its_groups(caplog: pytest.LogCaptureFixture) -> None:
    runner = await FilterRunner.start(f"{FUNCTIONS}:drops_and_leaks", limits=LOW)
    try:
        assert not any([await runner.keeps("objects", [0.5], "{}") for _ in range(2 * CALLS_A_LOOK)])
        assert not caplog.text
        assert await runner.keeps("bytes", [0.5], "{}")
        assert "the limit is reward.memory_mb = 256; the group is kept" in caplog.text
        assert not await runner.keeps("nothing", [0.5], "{}")
    finally:
        await runner.close()


async def test_a_module_that_needs_too_much_is_refused_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_rewards.py").write_text("table = bytearray(512 << 20)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with refused(InvalidValue, field="--reward", names=("reward.memory_mb",)):
        await RewardRunner.start("large_rewards:score", limits=LOW)


async def test_an_idle_process_that_grows_is_replaced(start: Start) -> None:
    """It uses what no call can be blamed for: its process has ended before the next call."""
    runner = await start("grows_when_idle", limits=LOW)
    first = await runner.score("", "", [], "{}")
    ended = os.pidfd_open(int(first.value))  # readable once the process has ended
    try:
        readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(ended, readable.set)
        await asyncio.wait_for(readable.wait(), ENDS_S)
    finally:
        asyncio.get_running_loop().remove_reader(ended)
        os.close(ended)
    second = await runner.score("", "", [], "{}")
    assert second.valid and second.value != first.value


SERVICE = """
import asyncio, json, sys
from dora.rewards import RewardRunner
async def main():
    runner = await RewardRunner.start("tests.abuse.hostile_rewards:leaves_behind", timeout_s=100)
    call = runner.score("", "", [], json.dumps({"alive": sys.argv[1]}))
    await call
    print("scored", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_what_a_function_has_started_ends_with_a_service_that_is_killed(alive: Any) -> None:
    path, ended = alive
    service = subprocess.Popen([sys.executable, "-c", SERVICE, path], stdout=subprocess.PIPE)
    assert service.stdout is not None and service.stdout.readline() == b"scored\n"
    service.kill()
    service.wait()
    service.stdout.close()
    assert ended()


# ----------------------------------------------------------------------------------------------------- how much it says


async def test_prints_are_cut_and_counted(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    runner = await start("prints")
    assert await runner.score("", "", [], "{}") == Reward(1.0)
    await runner.close()
    log = capfd.readouterr().err
    assert 60_000 < len(log) < 70_000
    assert log.count("prints too much") == 1 and log.count("bytes that were dropped") == 1


@pytest.mark.parametrize("name", ["a million components", "a long component"])
async def test_a_verdict_without_bounds_is_cut_and_its_reward_counts(start: Start, name: str) -> None:
    runner = await start("returns")
    reward = await runner.score(name, "", [], "{}")
    assert reward.valid and len(reward.components) <= COMPONENTS_MAX and len(reward.log) < 2000
    assert all(len(each.encode()) <= NAME_MAX_BYTES for each in reward.components)
    assert ("left out" in reward.log) == (name == "a million components")
    assert (await runner.score("bool", "", [], "{}")).valid


async def test_a_long_log_is_cut(start: Start) -> None:
    runner = await start("returns")
    assert await runner.score("a long log", "", [], "{}") == Reward(1.0, log="é" * (LOG_MAX_BYTES // 2))


def test_the_largest_verdict_fits_where_a_trajectory_has_room_for_it() -> None:
    reward = reward_of("m:f", verdict(hostile_rewards.VALUES["the largest"]))
    message = pb.Trajectory(verifier_log=reward.log, reward_components=dict(reward.components))
    assert reward.valid and len(reward.components) == 128 and message.ByteSize() <= 64 << 10
    assert len(frames.encode(verdict(hostile_rewards.VALUES["the largest"]))) < frames.ANSWER_MAX_BYTES


@pytest.mark.parametrize(
    ("function", "what"), [("raises_awkwardly", "raised AwkwardError"), ("raises_many_lines", "first second?[31mxxx")]
)
async def test_an_error_is_one_short_line(start: Start, function: str, what: str) -> None:
    reward = await (await start(function)).score("", "", [], "{}")
    assert not reward.valid and what in reward.log
    assert len(reward.log) < 1000 and reward.log.isprintable()


# ------------------------------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize(
    ("name", "value"), [("np.bool_", 1.0), ("np.float32", 0.5), ("np.int64", 2.0), ("array of no dimension", 0.5)]
)
async def test_scalars_of_numpy_are_numbers(start: Start, name: str, value: float) -> None:
    assert await (await start("returns")).score(name, "", [], "{}") == Reward(value)


async def test_what_is_no_finite_number_is_invalid_with_a_reason(start: Start) -> None:
    runner = await start("returns")
    wrong = ("nan", "infinity", "complex", "np.complex64", "text", "bytes", "none", "array", "10,000 digits")
    for name in (*wrong, "awkward"):
        reward = await runner.score(name, "", [], "{}")
        assert not reward.valid and reward.value == 0.0, name
        assert " returned " in reward.log and len(reward.log) < 1000, name
    for name in ("awkward component", "awkward log"):
        reward = await runner.score(name, "", [], "{}")
        assert reward.valid and "left out" in reward.log and len(reward.log) < 1000, name
    half = await runner.score("half a character", "", [], "{}")
    assert half == Reward(1.0, components={"b?": 1.0}, log="a?")


async def test_an_asynchronous_function_is_awaited(start: Start) -> None:
    runner = await start("asynchronous", timeout_s=1.0)
    assert await runner.score("", "", [], '{"reward": 0.5}') == Reward(0.5)
    assert "raised ZeroDivisionError" in (await runner.score("raise", "", [], "{}")).log
    assert "took longer" in (await runner.score("hang", "", [], "{}")).log
    assert await runner.score("", "", [], '{"reward": 0.25}') == Reward(0.25)


async def test_a_filter_may_be_asynchronous_and_numpy_s() -> None:
    runner = await FilterRunner.start(f"{FUNCTIONS}:keeps_asynchronously")
    try:
        assert await runner.keeps("", [0.5], "{}") and not await runner.keeps("", [0.0], "{}")
    finally:
        await runner.close()


async def test_half_a_character_in_a_prompt_reaches_the_function(start: Start) -> None:
    assert await (await start("returns")).score("bool", "\ud800", [], '{"a": "\ud800"}') == Reward(1.0)


# ------------------------------------------------------------------------------------------------------- at the start


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("of_the_wrong_arity", r"a function of \(prompt_text, response_text, response_token_ids, .*takes \(prompt"),
        ("not_callable", "is of the type float"),
        *full(
                ("keeps_asynchronously", "too many positional arguments"),
                ("with_a_required_keyword", "missing a required .*'tokenizer'"),
                ("generates", "contains yield"),
),
    ],
)  # fmt: skip
async def test_a_function_that_no_call_can_reach_is_refused_at_the_start(function: str, message: str) -> None:
    with refused(InvalidValue, field="--reward", names=data_words(message)) as caught:
        await RewardRunner.start(f"{FUNCTIONS}:{function}", workers=2)
    assert str(caught.value).isprintable() and caught.value.field == "--reward"


@pytest.mark.parametrize("statement", ["raise SystemExit('enough\\nof it')", "import os; os._exit(3)", "(", "1 / 0"])
async def test_a_module_that_cannot_be_imported_is_refused_in_one_line(
    statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text(statement)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with refused(InvalidValue, field="--reward", value="broken_rewards:score") as caught:
        await RewardRunner.start("broken_rewards:score")
    assert str(caught.value).isprintable()


async def test_a_filter_of_the_wrong_arity_is_refused_at_the_start() -> None:
    with refused(
        InvalidValue, field="selection.filter", value="tests.abuse.hostile_rewards:forks", names=("prompt_text",)
    ):
        await FilterRunner.start(f"{FUNCTIONS}:forks")


# ------------------------------------------------------------------------------------------------------------- its time


async def test_a_service_that_stands_still_takes_the_verdict_that_came_meanwhile(start: Start) -> None:
    runner = await start("returns", timeout_s=0.5)
    call = asyncio.create_task(runner.score("bool", "", [], "{}"))
    await asyncio.wait({call}, timeout=0)  # it is in the queue
    await asyncio.wait({call}, timeout=0)  # it is on its way
    threading.Event().wait(1.0)  # the event loop stands still, as in a suspended process: the time is what is tested
    assert await call == Reward(1.0)


def test_time_in_which_a_process_was_suspended_does_not_count() -> None:
    now_s = 0.0
    limit = RunningTime(1.0, clock=lambda: now_s)
    slices = 0
    while slice_s := limit.next_slice_s():
        assert slice_s <= SLICE_S
        now_s += 3600.0  # each time it sleeps through the slice and an hour more
        slices += 1
    assert slices == 4


# ----------------------------------------------------------------------------------------------------------- generated


@pytest.mark.parametrize("count", counts_of(2000, 10_000))
async def test_of_thousands_of_verdicts_each_is_its_own_call_s_and_finite_or_invalid(start: Start, count: int) -> None:
    runner, valid = await start("returns_anything", workers=2), 0
    for first in range(0, count, 1000):
        seeds = range(first, first + 1000)
        rewards = await asyncio.gather(*(runner.score(str(seed), "", [], "{}") for seed in seeds))
        for seed, reward in zip(seeds, rewards, strict=True):
            meant = reward_of("", verdict(hostile_rewards.anything(random.Random(seed))))
            assert (reward.valid, reward.value, reward.components) == (meant.valid, meant.value, meant.components)
            assert abs(reward.value) < float("inf") and len(reward.log) < 1000
            valid += reward.valid
    assert count // 20 < valid < count - count // 20


def test_ten_thousand_answers_of_a_broken_process_are_a_reward_or_none() -> None:
    chance = random.Random(38)
    for _ in range(10_000):
        packed = bytearray(msgpack.packb({"reward": 1.0, "components": {"a": 0.5}, "log": "x", "ticket": b"12345678"}))
        for _ in range(chance.randrange(1, 4)):
            packed[chance.randrange(len(packed))] = chance.randrange(256)
        with contextlib.suppress(ValueError):
            message = frames.first(len(packed).to_bytes(4, "little") + packed, frames.ANSWER_MAX_BYTES)
            assert message is not None
            reward = reward_of("m:f", message)
            assert type(reward.value) is float and abs(reward.value) < float("inf")


# --------------------------------------------------------------------------------------------------------- the service


@pytest.mark.full
async def test_a_service_delivers_its_steps_whatever_the_function_does(tiny_dense: Path) -> None:
    config = configured(
        tiny_dense, workers__engine="fake", reward__function=f"{FUNCTIONS}:changes", reward__timeout_s=1.0
    )
    async with running(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        steps = await train(handle, trainer, steps=2, groups=3)
    check_promises(steps, window=2, groups=3)
    trajectories = [each for step in steps for group in step for each in group.trajectories]
    for each in trajectories:
        cut = "left out" in each.verifier_log  # its components, not its reward
        assert each.reward == (1.0 if cut else each.length_tokens) if each.reward_valid else each.verifier_log
    assert {each.reward_valid for each in trajectories} == {False, True}


async def test_the_settings_reach_reward_function_and_filter(tiny_dense: Path) -> None:
    config = configured(
        tiny_dense,
        workers__engine="fake",
        reward__function=f"{FUNCTIONS}:limits_seen",
        reward__memory_mb=512,
        reward__open_files=100,
        reward__calls_max=4,
        selection__filter=f"{FUNCTIONS}:keeps_within_limits",
    )
    async with running(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
        steps = await train(handle, trainer, steps=2, groups=3)
    seen = [each.reward_components for step in steps for group in step for each in group.trajectories]
    assert {(each["memory_mb"], each["open_files"]) for each in seen} == {(512.0, 100.0)}
    processes = [each["process"] for each in seen]
    assert max(map(processes.count, processes)) <= 4
