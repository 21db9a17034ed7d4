"""Drafts from the history of responses, and whether they pay."""

import random

import pytest

from dora.data.limits import DRAFT_TOKENS_MAX
from dora.data.remembered import Remembered, scope_of, task_scope_of
from dora.data.types import RequestSpec, SamplingParams
from dora.worker.drafting.drafter import BACK_OFF_MAX, Drafter
from dora.worker.drafting.history import TOKEN_BYTES, History
from dora.worker.drafting.pace import SMALL, Pace, Worth

MIB = 1 << 20
LOOP = [7, 8, 9, 10, 11, 12, 13, 14]
SCOPE = (b"prompt",)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def request(prompt: tuple[int, ...] = (1, 2, 3), outputs: tuple[int, ...] = ()) -> RequestSpec:
    return RequestSpec("r", 1, prompt, SamplingParams(), outputs, (0.0,) * len(outputs))


def drafted(drafter: Drafter, name: str = "1-r", most: int = 99) -> list[int]:
    assert drafter.begin_step(1)
    return drafter.drafts({name: most}).get(name, [])


# History.


def test_a_draft_goes_on_as_the_same_tokens_went_on_before() -> None:
    history = History(MIB)
    history.end(history.begin(SCOPE, [1, 2, 3, 4, 5, 6]), is_kept=True)
    now = history.begin(SCOPE, [9, 2, 3])
    draft, shares = history.draft(now, 8, 0.05)
    assert draft == [4, 5, 6]
    assert shares == sorted(shares, reverse=True) and all(0 < share < 1 for share in shares)
    assert history.draft(now, 2, 0.05)[0] == [4, 5]
    assert history.draft(now, 8, 0.999) == ([], [])


def test_a_request_drafts_from_its_own_tokens() -> None:
    history = History(MIB)
    now = history.begin(SCOPE, [*LOOP, *LOOP[:3]])
    assert history.draft(now, 5, 0.05)[0] == LOOP[3:]


def test_a_longer_match_outweighs_younger_ones_and_younger_outweigh_older() -> None:
    history = History(MIB)
    history.begin(SCOPE, [5, 6, 7, 8, 20])
    for _ in range(3):
        history.begin(SCOPE, [9, 9, 7, 8, 30])
    assert history.draft(history.begin(SCOPE, [5, 6, 7, 8]), 1, 0.0)[0] == [20]
    equal = History(MIB)
    for last in (20, 30):
        equal.begin(SCOPE, [7, 8, last])
    assert equal.draft(equal.begin(SCOPE, [7, 8]), 1, 0.0)[0] == [30]


def test_scopes_are_apart_and_the_closest_one_with_a_match_counts() -> None:
    history = History(MIB)
    history.begin((b"other",), [1, 2, 3])
    history.begin((b"far", b"task"), [1, 2, 4])
    assert history.draft(history.begin((b"own",), [1, 2]), 1, 0.0)[0] == []
    assert history.draft(history.begin((b"own", b"task"), [1, 2]), 1, 0.0)[0] == [4]


def test_memory_is_bounded_and_the_scope_longest_not_used_goes_first() -> None:
    history = History(100 * TOKEN_BYTES)
    first = history.begin((b"first",), [1, 2, 3])
    for number in range(40):
        history.end(history.begin((b"scope", str(number).encode()), LOOP), is_kept=True)
        assert history.size_bytes <= 100 * TOKEN_BYTES
    history.extend(first, [4])  # its scope is forgotten
    assert history.draft(first, 4, 0.0) == ([], [])
    history.end(history.begin((b"own",), LOOP), is_kept=False)
    assert history.draft(history.begin((b"own",), LOOP[:2]), 4, 0.0) == ([], [])


def test_a_lookup_costs_no_more_in_a_long_history() -> None:
    """Counts candidates, which a draft's time depends on."""
    history = History(64 * MIB)
    for seed in range(200):
        chosen = random.Random(seed)
        history.begin(SCOPE, [chosen.randrange(3) for _ in range(100)])
    now = history.begin(SCOPE, [0, 1])
    assert len(history._candidates(now)) <= 12


# Pace.


def paced(base_s: float, token_s: float, verify_s: float = 0.0) -> Pace:
    pace, chosen = Pace(), random.Random(1)
    for _ in range(400):
        fed, drafts = chosen.randrange(1, 9), chosen.choice([0, 0, 6])
        pace.observe(base_s + token_s * (fed + drafts) + verify_s * bool(drafts), fed + drafts, drafted=bool(drafts))
    return pace


def test_the_cost_of_a_step_is_measured() -> None:
    pace = paced(0.003, 0.0002, 0.0005)
    assert pace.step_s(4, drafted=False) == pytest.approx(0.0038, rel=0.05)
    assert pace.step_s(12, drafted=True) == pytest.approx(0.0059, rel=0.05)


def test_drafts_pay_in_small_batches_and_not_in_full_ones() -> None:
    pace = paced(0.003, 0.0002)
    assert pace.least_share(1, 1.0) < 0.2
    assert pace.least_share(256, 256.0) > 0.9
    assert pace.pays(1, 4, 1.0)
    assert not pace.pays(256, 1024, 300.0)


def test_an_interrupted_step_is_no_measure() -> None:
    pace = paced(0.003, 0.0002)
    before = pace.step_s(4, drafted=False)
    for _ in range(40):
        pace.observe(0.5, 4, drafted=False)
    assert pace.step_s(4, drafted=False) == before


# Drafter.


def looked(requests: int, step_s: float, tokens_with_drafts: int, steps: int = 2_000) -> float:
    """The share of steps that look for drafts, where a step without lookups takes a second."""
    worth, found = Worth(), 0
    for _ in range(steps):
        looks = worth.looks(requests)
        found += looks
        worth.stepped(requests, step_s if looks else 1.0, tokens_with_drafts if looks else requests, looked=looks)
    return found / steps


def test_a_large_batch_looks_for_drafts_only_while_that_pays() -> None:
    assert looked(64, 1.2, 64) < 0.03, "lookups cost time, and nothing is found"
    assert looked(64, 1.2, 70) < 0.03, "a draft costs more than it brings"
    assert looked(64, 1.2, 128) > 0.97
    assert looked(SMALL, 1.2, SMALL) == 1.0, "each request of a small batch rests by itself"


def test_a_large_batch_changes_its_mind() -> None:
    worth = Worth()
    shares = []
    for tokens in (64, 128, 64):  # with drafts
        looks = [worth.looks(64)]
        for _ in range(1_000):
            worth.stepped(64, 1.2 if looks[-1] else 1.0, tokens if looks[-1] else 64, looked=looks[-1])
            looks.append(worth.looks(64))
        shares.append(sum(looks[-300:]) / 300)
    assert shares[0] < 0.1 and shares[1] > 0.9 and shares[2] < 0.1


def test_siblings_and_earlier_epochs_and_sessions_of_a_task_are_drafted() -> None:
    drafter = Drafter(MIB, is_shared=True)
    drafter.begin("1-a", request(outputs=tuple(LOOP)))
    drafter.forget("1-a")
    drafter.begin("2-b", request(outputs=tuple(LOOP[:2])))
    assert drafted(drafter, "2-b") == LOOP[2:]
    task = task_scope_of("lookup")
    drafter.remember(Remembered(scope_of((5, 6)), task, (5, 6, 40, 41, 42, 43)))
    drafter.remember(Remembered(scope_of((7, 7)), task, ()))
    drafter.begin("3-c", request((7, 7), (40, 41)))
    assert drafted(drafter, "3-c") == [42, 43]


def test_an_own_history_forgets_a_request_with_its_end() -> None:
    drafter = Drafter(MIB, is_shared=False)
    drafter.begin("1-a", request(outputs=tuple(LOOP)))
    drafter.remember(Remembered(scope_of((1, 2, 3)), b"", (1, 2, 3, *LOOP)))
    drafter.begin("2-b", request(outputs=tuple(LOOP[:2])))
    assert drafted(drafter, "2-b") == []
    drafter.sampled("1-a", LOOP[:2], 0)
    assert drafted(drafter, "1-a")[:6] == LOOP[2:]


def test_a_turn_continues_a_request_and_a_fork_begins_it_anew() -> None:
    drafter = Drafter(MIB, is_shared=True)
    drafter.begin("1-a", request())
    drafter.sampled("1-a", LOOP, 0)
    drafter.begin("1-a", request(outputs=(*LOOP, 50, 51)))
    drafter.sampled("1-a", LOOP[:2], 0)
    assert drafted(drafter, "1-a")[:6] == LOOP[2:]
    drafter.begin("1-a", request(outputs=(60, 61)))
    assert drafted(drafter, "1-a") == []


def test_a_draft_fits_the_request_and_the_engine() -> None:
    drafter = Drafter(MIB, is_shared=True)
    drafter.begin("1-a", request(outputs=tuple(range(100, 160))))
    drafter.begin("2-b", request(outputs=(100, 101)))
    assert len(drafted(drafter, "2-b")) == DRAFT_TOKENS_MAX
    assert drafted(drafter, "2-b", most=2) == [102, 103]
    assert drafted(drafter, "2-b", most=0) == []


def test_drafts_that_are_not_accepted_end_by_themselves_and_are_tried_again() -> None:
    drafter = Drafter(MIB, is_shared=True)
    drafter.begin("1-a", request(outputs=tuple(range(100, 150))))
    drafter.begin("2-b", request(outputs=(100, 101)))
    lengths = []
    for step in range(300):
        draft = drafted(drafter, "2-b")
        lengths.append(len(draft))
        drafter.sampled("2-b", [(100, 101)[step % 2]], len(draft))
    assert lengths[0] == DRAFT_TOKENS_MAX
    assert sum(map(bool, lengths[100:])) < 100
    assert any(lengths[300 - 4 * BACK_OFF_MAX :])
    assert drafter.accepted_tokens == 0 < drafter.drafted_tokens


def test_nothing_is_drafted_where_a_full_batch_has_no_room() -> None:
    clock = Clock()
    drafter = Drafter(MIB, is_shared=True, clock=clock)
    names = [f"{index}-r" for index in range(64)]
    for name in names:
        drafter.begin(name, request(outputs=(*LOOP, *LOOP[:2])))
    found: list[int] = []
    for _ in range(200):
        drafts = drafter.drafts(dict.fromkeys(names, 20)) if drafter.begin_step(len(names)) else {}
        fed = len(names) + sum(map(len, drafts.values()))
        drafter.scheduled(fed)
        clock.now_s += 1e-6 + 1e-4 * fed  # all of it for tokens
        drafter.stepped()
        for name in names:
            drafter.sampled(name, [3], len(drafts.get(name, ())))
        found.append(len(drafts))
    assert not any(found[100:])
