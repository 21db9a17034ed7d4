"""Settings that change between two incarnations: admitted groups keep what was promised to them, and a change that they
do not allow is refused by name.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.config import Config, validated
from dora.core.groups.window import Window
from dora.data.types import Prompt
from dora.errors import IllegalTransition, InvalidValue
from dora.journal import records
from dora.journal.content import LiveGroup
from dora.journal.durable import OPEN, Durable, OpenGroup
from dora.orchestrator.recovery.changed_settings import check_changes, pinned
from dora.orchestrator.recovery.recovery_state import RestoredWindow, restored_window
from tests.refusals import refused
from tests.sweeps import examples
from tests.unit.journal.contents import content_of
from tests.unit.journal.incarnations import SMALL, Incarnation, Known, opened
from tests.unit.journal.test_compaction import with_slow_groups
from tests.unit.test_window import CHOICES, GROUPS, MOST, SIZES, Group, apply


def configured(**sections: Any) -> Config:
    return validated({"workers": {"max_model_len_tokens": 4096}, **sections})


def live(number: int, version: int, size: int, step: int = OPEN, **prompt: Any) -> LiveGroup:
    given_prompt = Prompt(f"p{number}", "task", (1,) * 10, "t", 1, **prompt)
    deadline = version + size - 1
    return LiveGroup(number, f"g{number}", given_prompt, version, deadline, size, 1.0, (number,), -1, 0, step, number)


def found(values: dict[str, Any], groups: list[LiveGroup], queued: tuple[Prompt, ...] = ()) -> Any:
    durable = Durable(**values)
    durable.groups = {each.number: OpenGroup(each.group_id, 1, each.step, each.taken) for each in groups}
    return SimpleNamespace(durable=durable, groups=groups, queued=list(enumerate(queued)))


def values_of(window: Window, short_step: int = -1) -> dict[str, Any]:
    return {
        "newest": window.newest,
        "groups_per_step": window.groups_per_step,
        "window_size": window.size,
        "left_behind": window.left_behind,
        "short_step": short_step,
    }


def started(
    window: Window, is_open: list[Group], size: int, groups: int, short_step: int
) -> tuple[RestoredWindow, Window]:
    """A window with other settings. Raises IllegalTransition if the open groups do not fit into it."""
    taken = (
        window.groups_per_step - (window.left if window.step == window.newest else 0) if short_step < 0 else 1
    )  # of a step that ended short, only that there is one
    config = configured(window={"size": size, "groups_per_step": groups})
    before = found(values_of(window, short_step), live_of(window, is_open, taken))
    stands = restored_window(before.durable, config.window)
    after = Window(stands.size, stands.groups_per_step)
    check_changes(config, config, before, "state")
    after.restore(
        window.newest,
        stands.step,
        stands.left,
        max(stands.left_behind, window.oldest_kept),
        [(group.version, group.deadline) for group in is_open],
    )
    return stands, after


def live_of(window: Window, is_open: list[Group], taken: int) -> list[LiveGroup]:
    leased = [live(number, window.newest, 1, step=window.newest) for number in range(taken)]
    return leased + [live(taken + number, group.version, group.size) for number, group in enumerate(is_open)]


@given(SIZES, GROUPS, CHOICES, SIZES, GROUPS, CHOICES)
@settings(max_examples=examples(400))
def test_groups_keep_their_deadlines_whatever_window_and_groups_a_start_sets(
    size: int, groups: int, choices: list[tuple[str, int]], size_now: int, groups_now: int, later: list[tuple[str, int]]
) -> None:
    """A change is refused exactly if groups could not be trained in time, and the number that it names is the least."""
    before, is_open = Window(size, groups), []
    for what, pick in choices:
        apply(before, is_open, what, pick)
    for version in list(before.quarantined):
        before.release(version)
    try:
        stands, window = started(before, is_open, size_now, groups_now, -1)
    except InvalidValue as error:
        assert error.field == "window.groups_per_step" and groups_now < groups
        least = int(error.allowed.removeprefix("at least ").partition(":")[0])
        assert groups_now < least <= groups
        started(before, is_open, size_now, least, -1)
        taken = groups - (before.left if before.step == before.newest else 0)
        if least - 1 > taken:
            with pytest.raises(IllegalTransition):
                Window(size_now, least - 1).restore(
                    before.newest, before.newest, least - 1 - taken, 0, [(g.version, g.deadline) for g in is_open]
                )
        return
    assert (window.size, window.groups_per_step) == (size_now, groups_now)
    assert window.newest in (window.step - 1, window.step) and stands.is_resized == (before.size != size_now)
    retired = before.oldest_kept
    for what, pick in later:  # ``apply`` asserts that no group is taken behind its deadline
        apply(window, is_open, what, pick)
        assert min(window.slack()) >= 0 and window.oldest_live >= retired
        assert window.newest - window.oldest_live + 1 <= MOST


@given(SIZES, GROUPS, SIZES, st.integers(1, 9))
def test_a_step_that_ended_short_stays_as_it_is(size: int, groups: int, size_now: int, groups_now: int) -> None:
    window = Window(size, groups + 1)
    window.admit(0)
    window.take(0, window.deadline(0))
    window.close_short()
    stands, after = started(window, [], size_now, groups_now, 0)
    assert (stands.step, stands.left) == (1, groups_now) and after.publish() == 1


@pytest.mark.parametrize(
    ("before", "now", "size"),
    [(3, {"size": 2}, 2), (2, {"size": 4}, 4), (3, {"size": "auto", "min": 1, "max": 2}, 2),
     (3, {"size": "auto", "min": 1, "max": 4}, 3), (1, {"size": "auto", "min": 2, "max": 4}, 2)],
)  # fmt: skip
def test_the_size_in_force_becomes_the_nearest_allowed(before: int, now: dict[str, Any], size: int) -> None:
    window = Window(before, 2)
    stands = restored_window(Durable(**values_of(window)), configured(window=now).window)
    assert stands.size == size and stands.groups_per_step == 2, "0 keeps what the trainer said"


def test_admitted_groups_keep_the_length_of_their_responses() -> None:
    overrides: list[dict[str, Any]] = [{}, {"max_tokens": 7, "top_k": 3}, {"top_k": 3}]
    groups = [live(number, 0, 2, sampling=sampling) for number, sampling in enumerate(overrides)]
    before, now = configured(rollout={"max_tokens": 100}), configured(rollout={"max_tokens": 50})
    assert [(group.number, group.prompt.sampling) for group in pinned(groups, before, now)] == [
        (0, {"max_tokens": 100}),
        (2, {"top_k": 3, "max_tokens": 100}),
    ]
    assert pinned(groups, before, before) == []


def test_a_context_too_short_for_what_is_admitted_or_queued_is_refused() -> None:
    values = {"newest": 0, "groups_per_step": 0, "window_size": 2, "left_behind": 0, "short_step": -1}
    before = configured(rollout={"max_tokens": 100})
    now = validated({"rollout": {"max_tokens": 20}, "workers": {"max_model_len_tokens": 109}})
    with refused(InvalidValue, field="workers.max_model_len_tokens", value=109, names=("p3", 110)):
        check_changes(before, now, found(values, [live(3, 0, 2)]), "state")
    check_changes(before, now, found(values, [], (Prompt("q", "t", (1,) * 89, "t", 1),)), "state")
    with refused(InvalidValue, field="workers.max_model_len_tokens", value=109, names=("q", 110)):
        check_changes(before, now, found(values, [], (Prompt("q", "t", (1,) * 90, "t", 1),)), "state")
    longer = validated({"rollout": {"max_tokens": 1000}, "workers": {"max_model_len_tokens": 1005}})
    with refused(InvalidValue, field="workers.max_model_len_tokens", names=("q",)):
        check_changes(before, longer, found(values, [], (Prompt("q", "t", (1,) * 90, "t", 1),)), "state")


def begun(incarnation: int, **prompts: Any) -> records.Begun:
    return records.Begun(incarnation, 0.0, 0.0, configured(prompts=prompts).model_dump_json())


@pytest.mark.parametrize(
    ("now", "place"),
    [({"source": "a.jsonl"}, 3), ({"source": "a.jsonl", "epochs": 7, "then": "wait", "shuffle_seed": 5}, 3),
     ({"source": "b.jsonl"}, 0), ({"source": "a.jsonl", "shuffle": True}, 0), ({"source": "a.jsonl", "split": "x"}, 0)],
)  # fmt: skip
def test_another_source_begins_at_its_first_prompt(now: dict[str, Any], place: int) -> None:
    durable, log = Durable(), list[records.LogRecord]()

    def tell(record: records.LogRecord) -> None:
        log.append(record)
        durable.apply(record)

    told = Incarnation(tell, Known())
    tell(begun(0, source="a.jsonl"))
    for _ in range(3):
        told.admit()
    tell(records.PromptsWithdrawn([], [5], []))
    tell(begun(1, **now))
    assert (durable.next_position, set(durable.passed)) == (place, {5} if place else set())
    for group in content_of(log, durable).groups():  # as a compaction writes them again
        durable.apply(group.admitted())
    assert (durable.next_position, set(durable.passed)) == (place, {5} if place else set())


async def test_a_length_of_admission_outlives_compaction(tmp_path: Path) -> None:
    folder, sizes = tmp_path / "state", replace(SMALL, segment_bytes=3000)
    _, log = opened(folder, sizes)
    told = Incarnation(log.append, Known())
    for _ in range(4):  # which do not live on
        told.step()
    kept = told.admit()
    log.append(records.Leased(kept, 1000))
    told.known.steps[kept] = 1000
    told.known.tokens = {}
    await log.close()
    there, log = opened(folder, sizes)
    again = pinned(there.groups, configured(rollout={"max_tokens": 77}), configured())
    assert kept in {group.number for group in again}
    for group in again:
        log.append(group.admitted())
    await log.close()
    _, log = opened(folder, sizes)
    told = Incarnation(log.append, told.known)
    await with_slow_groups(log, told)
    await log.checkpoint()
    await log.close()
    assert not (folder / "log" / "00000001.seg").exists(), "the segment of its admission is gone"
    there, log = opened(folder, sizes)
    await log.close()
    assert {group.number: group.prompt.sampling for group in there.groups}[kept] == {"max_tokens": 77}
