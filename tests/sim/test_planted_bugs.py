"""The checks can fail: each bug planted here must be caught within a few seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from dora.lab.sim.faults.trial import DRAWN, Trial
from tests.sim import growth_plants as growth
from tests.sim import plants
from tests.sim import session_plants as sessions
from tests.sweeps import seeds_of

SEEDS = 60


@dataclass(frozen=True)
class Bug:
    """``what`` it is, and who had it; ``caught``: what the first failure says, one of these; ``kinds`` of faults;
    ``window`` of the trials; ``first`` seed that is tried, where most before it see nothing."""

    what: str
    caught: str
    plant: Callable[[pytest.MonkeyPatch], None]
    kinds: str = "all"
    window: str = DRAWN
    first: int = 0

    @property
    def seeds(self) -> list[int]:
        """All, in the order in which they are tried."""
        return [*range(self.first, SEEDS), *range(self.first)]


BUGS = [
    Bug("a cap of W * B groups in flight instead of deadlines", "C3", plants.count_based_admission),
    Bug("one group more than fits is admitted", "C3", plants.feasible_off_by_one),
    Bug("the oldest version is topped up again and again", "C3", plants.tops_up_the_oldest),
    Bug("warm-up submits more than a step may take", "C3", plants.warm_up_over_submits),
    Bug("a step takes what is finished, not what is due", "C3|C1|may not take", plants.takes_whatever_is_finished),
    Bug("what is in flight is not counted (verl-recipe 113)", "C3", plants.in_flight_not_counted),
    Bug("full storage stops nothing", "while storage is full", plants.full_storage_is_not_looked_at, "storage"),
    Bug("admission stays closed once storage is well", "not done", plants.full_storage_closes_for_ever, "storage"),
    Bug(
        "a wider window holds for what was admitted before",
        "admitted in a window of|by deadline",
        plants.wider_window_holds_for_what_was_admitted,
        window="auto",
        first=7,
    ),
    Bug(
        "a narrower window lets go what it still needs",
        "C1",
        plants.narrower_window_lets_older_versions_go,
        window="auto",
    ),
    Bug(
        "a narrower window holds for what was admitted before",
        "C3|to give back",
        plants.narrower_window_holds_for_what_was_admitted,
        window="auto",
    ),
    Bug("a version that was let go comes back", "C1|let go|not done", plants.let_go_version_comes_back, window="auto"),
    Bug("a cancelled group's place is not given back", "C3", plants.cancelled_keeps_its_place),
    Bug("staleness passes its bound after recovery (AReaL 1388)", "C3", plants.recovery_forgets_what_was_taken),
    Bug("an undersized buffer: prompts are asked for once only", "not done", plants.draws_prompts_once),
    Bug("a version is read twice (AReaL 1569)", "C1", plants.version_read_twice),
    Bug(
        "the version is stamped at completion (rLLM 622)",
        "C3|may not take|no open group",
        plants.version_stamped_at_completion,
    ),
    Bug("weights change under live requests", "C1", plants.load_under_live_requests),
    Bug("a worker serves before its first weights are there", "C1", plants.failed_load_serves, "copy"),
    Bug("a failed load is never tried again", "not told to load", plants.failed_load_is_never_tried_again),
    Bug("weights are let go while a group of theirs is open", "C1", plants.weights_let_go_too_early),
    Bug(
        "workers are replaced for what their trainer published",
        "nobody can",
        plants.refusal_is_always_the_workers_fault,
        "publish",
    ),
    Bug("a rejected version is planned for", "is to host", plants.rejected_version_is_planned_for, "publish"),
    Bug("a step goes on under a rejection", "'streamed': False", plants.stream_goes_on_under_a_rejection, "publish"),
    Bug("nobody tries what one has refused", "nobody tries it", plants.doubted_version_is_tried_by_nobody, "publish"),
    Bug("rejected weights are let go", "were retired", plants.rejected_version_is_retired, "publish"),
    Bug("the index of hosts is not told of a drain", "is listed at", plants.drain_is_not_listed, "leave"),
    Bug("the index of hosts is not told of a new target", "is listed at", plants.target_is_not_listed),
    Bug("a worker that got work is still listed as idle", "listed as idle", plants.busy_worker_stays_idle),
    Bug("a snapshot does not hear of what a worker got", "loads of indexes", plants.given_work_is_not_noted),
    Bug("what is to stay is counted again at every change", "to stay are", plants.staying_is_counted_again),
    Bug("a worker without tokens stays", "not done", plants.worker_without_tokens_stays, "stall"),
    Bug("a stalled trainer keeps all others out", "does not lapse", plants.lease_never_lapses, "lease"),
    Bug("a trainer at work may be replaced", "works, and its lease", plants.lease_lapses_early, "lease"),
    Bug("a worker that is slow is replaced", "works, and is replaced", plants.patience_is_short, "slow"),
    Bug("requests die with their worker (verl 7910)", "C2", plants.dead_worker_keeps_its_requests),
    Bug(
        "the router picks a dead worker again (NeMo-RL 3613)",
        "gone|no living worker|not told|is taken",
        plants.dead_worker_is_picked_again,
        first=6,
    ),
    Bug("reports of an epoch that is over count", "lost epoch|gone", plants.epoch_is_not_looked_at, "partition"),
    Bug("progress is reset on retry", "C2", plants.progress_reset_on_retry),
    Bug("claims on KV are never given back", "claimed", plants.claims_never_given_back),
    Bug(
        "an aborted request stays on its worker (vLLM 46283)",
        "C1|C2|holds",
        plants.aborted_request_is_left_on_its_worker,
        "cancel",
    ),
    Bug("a refused request leaves a trace", "yet changed", plants.drain_is_noted_before_it_is_refused, "leave"),
    Bug(
        "the source frees before its target commits",
        "C2|not done",
        plants.source_freed_before_commit,
        "handoff,migrate",
        first=25,
    ),
    Bug(
        "a failed handoff leaves its request frozen",
        "not done|works, and is replaced",
        plants.failed_handoff_stays_frozen,
        first=5,
    ),
    Bug("handoffs of a lost worker are not settled", "C2|handoff|gone", plants.lost_workers_handoffs_go_on),
    Bug(
        "a request whose source died and whose copy fails is forgotten",
        "C2",
        plants.stranded_request_is_forgotten,
        "handoff,kill",
        first=13,
    ),
    Bug(
        "a source's second death ends its first life's handoff",
        "SOURCE_LOST in phase STRANDED",
        plants.later_life_ends_a_stranded_handoff,
        "strand",
    ),
    Bug("KV snapshots are never released", "never released", plants.snapshot_is_never_released),
    Bug(
        "an undone handoff is not undone at its target",
        "C1|C2|holds",
        plants.reservation_is_not_cancelled,
        "handoff,copy",
    ),
    Bug("what lay in a lost pool is still counted on", "are parked", plants.lost_pool_is_still_counted_on, "pool"),
    Bug("requests die with their pool", "C2", plants.lost_pools_requests_are_forgotten, "pool"),
    Bug("claims on a pool are never given back", "claimed", plants.parked_claims_are_never_given_back, "pool"),
    Bug("a pool is promised more than it holds", "claimed", plants.pool_takes_more_than_it_holds, "pool", first=7),
    Bug("a resume that fails is not tried again", "C2", plants.failed_resume_is_not_tried_again, "pool"),
    Bug(
        "a cancelled request stays in its pool",
        "still holds",
        plants.cancelled_request_stays_parked,
        "pool,cancel",
        first=41,
    ),
    Bug("a request is resumed, and waits too", "C2", plants.resumed_request_stays_in_line, "pool"),
    Bug("a full queue drops its oldest", "C2", plants.queue_drops_the_oldest),
    Bug("the trainer's death drops what it had (verl 7579)", "C2", plants.lease_ends_with_its_trainer),
    Bug("groups are delivered twice after a trainer's restart", "C2", plants.leased_groups_are_queued_again, first=22),
    Bug(
        "a trainer that was replaced may still commit",
        "not refused|C2",
        plants.trainer_epoch_is_not_looked_at,
        "trainer,stale",
    ),
    Bug("a repeated commit counts twice", "not refused|yet changed|C2", plants.commit_counts_twice, first=38),
    Bug("long rollouts are dropped (tinker-cookbook 822)", "C2", plants.straggler_is_dropped),
    Bug("a step drops more than its redundant share", "C2", plants.more_is_dropped_than_is_redundant, first=21),
    Bug("the last step ends before its groups are there", "C2|not done", plants.step_ends_short_too_early),
    Bug("an evaluation keeps slots that training wants", "evaluates", plants.evaluation_keeps_its_slots, "evaluate"),
    Bug("evaluations die with their worker", "C2|hold", plants.evaluations_die_with_their_worker, "evaluate,kill"),
    Bug("an evaluation outlives its weights", "C1", plants.evaluation_outlives_its_weights, "evaluate"),
    Bug("an evaluation ends too early", "C2", plants.evaluation_ends_with_its_last_prompt, "evaluate"),
    Bug("a preempted request is forgotten", "C2", plants.preempted_evaluation_is_forgotten, "evaluate"),
    Bug("an evaluation takes more than its share", "lent", plants.evaluation_takes_more_than_its_share, "evaluate"),
    Bug("an evaluated turn counts as the end", "C2", sessions.evaluated_turn_counts_as_an_end, "evaluate,session"),
    Bug(
        "an evaluated session that is replaced keeps its tokens",
        "C2",
        sessions.evaluated_replacement_keeps_its_tokens,
        "evaluate,session",
    ),
    Bug("the core is not deterministic", "replayed", plants.core_draws_lots, first=19),
    Bug("what a step had taken is open again after a crash", "C2|C3", plants.leased_groups_are_open_again, "crash"),
    Bug(
        "two that come back go on with one request",
        "C2|C1|counted otherwise",
        plants.returned_request_is_taken_twice,
        "crash,migrate,handoff",
    ),
    Bug("ids of groups begin anew after a crash", "C1|C2|C3|journal", plants.ids_begin_anew, "crash"),
    Bug("restored requests wait in no line", "C2", plants.restored_requests_stand_in_no_line, "crash"),
    Bug(
        "restored deadlines follow the window of now",
        "C3",
        plants.deadlines_follow_the_window_of_now,
        "crash",
        window="auto",
        first=22,
    ),
    Bug("a verdict that is due counts as given", "C2|journal", plants.verdicts_that_are_due_count_as_given, "crash"),
    Bug("nobody asks for a lost verdict again", "not done", plants.lost_verdicts_are_not_asked_for_again, "crash"),
    Bug("a trainer is told before it is durable", "C2|newest", plants.trainer_is_told_before_the_journal, "crash"),
    Bug("tokens that are held are taken once more", "C1|ReportError", plants.repeated_tokens_are_taken_twice),
    Bug("the journal mixes up a report's tokens", "C1|ReportError", plants.journal_mixes_up_tokens, "crash"),
    Bug("a restored response lacks tokens", "C1|ReportError", plants.restored_book_lacks_its_last_tokens, "crash"),
    Bug("weights change under idle sessions", "C1", sessions.weights_change_under_idle_sessions, "session", first=4),
    Bug(
        "idle sessions stay with a lost worker",
        "asked at",
        sessions.idle_sessions_stay_with_a_lost_worker,
        "session,kill",
        first=4,
    ),
    Bug("a turn counts as an end", "counted otherwise", sessions.turn_counts_as_an_end, "session", first=4),
    Bug("a replacement is one more", "counted otherwise", sessions.replacement_counts_as_one_more, "session", first=4),
    Bug("a replacement has the same name", "C2", sessions.replacement_has_the_same_name, "session", first=4),
    Bug(
        "a replacement is of the newest version",
        "idles_no_more|C1",
        sessions.replacement_is_of_the_newest_version,
        "session",
        first=9,
    ),
    Bug("a turn asked in a handoff is lost", "requested turns", sessions.turn_asked_in_a_handoff_is_lost, first=11),
    Bug("a moved session is not extended", "C2", sessions.moved_session_is_not_extended, "session,pool", first=4),
    Bug("silent sessions are waited for", "not done", sessions.silent_sessions_are_waited_for, "session", first=4),
    Bug("a session ends twice", "was not refused", sessions.ended_session_may_end_again, "session", first=4),
    Bug(
        "a caller's group is beyond the window", "C3|not refused", sessions.opened_groups_are_beyond_the_window, "open"
    ),
    Bug("two turns at once", "not refused|KeyError", sessions.two_turns_at_once, "session"),
    Bug("an asked turn is queued twice", "C2", sessions.asked_turn_is_queued_twice, "session", first=4),
    Bug(
        "a worker continues another history",
        "ends after",
        sessions.another_history_is_continued,
        "session,crash",
        first=5,
    ),
    Bug("the journal forgets attempts", "C2", sessions.journal_forgets_attempts, "session,crash", first=42),
    Bug("the journal forgets ends", "has ended|C2", sessions.journal_forgets_ends, "session,crash", first=7),
    Bug("a fork keeps KV", "another branch", sessions.fork_keeps_the_kv_of_the_branch_it_leaves, "session", first=5),
    Bug("a left branch counts", "earlier branch", sessions.branch_that_a_fork_left_counts_for_ever, "session", first=5),
    Bug("the journal forgets forks", "C2", sessions.journal_forgets_forks, "session,crash", first=4),
    Bug("a token counts twice", "loss mask", sessions.sampled_tokens_count_in_each_branch, "session", first=5),
    Bug("dropped KV is believed to be there", "C2", sessions.dropped_kv_is_believed_there, "session,pool", first=1),
    Bug("a cancelled session stays idle", "idle", sessions.cancelled_session_stays_idle, "session", first=4),
    Bug("all members of a group start at once", "has started", growth.all_members_start, "session"),
    Bug("a settled group grows", "rewards ask", growth.settled_group_grows, "session"),
    Bug("an invalid reward differs from others", "rewards ask", growth.invalid_reward_decides, "session"),
    Bug("members that start late are in no queue", "nowhere", growth.late_members_stand_in_no_queue, "session"),
    Bug("members that start late are not counted", "counted|C2", growth.late_members_are_not_counted, "session"),
    Bug("a settled group waits for its rest", "counted", growth.settled_group_waits_for_its_rest, "session"),
    Bug(
        "a group that grew is delivered as it began", "as a group of", growth.group_is_delivered_as_it_began, "session"
    ),
    Bug("a settled group has the full size", "as a group of", growth.trainer_is_told_the_full_size, "session"),
    Bug(
        "a restart starts dormant members",
        "journal says|all scored",
        growth.restart_wakes_dormant_members,
        "session,crash",
        first=1,
    ),
    Bug("a restart forgets rewards", "unfinished", growth.restart_forgets_what_rewards_were, "session,crash", first=27),
    Bug("a settled group looks damaged", "lacks", growth.log_of_a_settled_group_looks_damaged, "session,crash"),
    Bug(
        "a crash between a verdict and what it starts",
        "journal says",
        growth.restart_misses_the_verdict_that_decides,
        "session,crash",
        first=37,
    ),
]

# Those that `make test` plants, each of another kind; `make test-all` plants all.
DISTINCT = {
    plants.count_based_admission,
    plants.tops_up_the_oldest,
    plants.full_storage_closes_for_ever,
    plants.version_read_twice,
    plants.load_under_live_requests,
    plants.epoch_is_not_looked_at,
    plants.claims_never_given_back,
    plants.source_freed_before_commit,
    plants.leased_groups_are_queued_again,
    plants.commit_counts_twice,
    plants.journal_mixes_up_tokens,
    growth.restart_wakes_dormant_members,
}


def marked(bugs: Sequence[Bug]) -> list[Any]:
    """Parameters of a test: ``make test`` has those that are distinct."""
    return [
        pytest.param(bug, marks=() if bug.plant in DISTINCT else pytest.mark.full, id=bug.plant.__name__)
        for bug in bugs
    ]


def test_the_suite_holds_what_peers_fell_into() -> None:
    planted = {bug.plant for bug in BUGS}
    assert len(planted) == len(BUGS) >= 20
    assert len(DISTINCT) == 12 and planted > DISTINCT
    assert planted > {
        plants.tops_up_the_oldest,
        plants.count_based_admission,
        plants.source_freed_before_commit,
        plants.version_read_twice,
    }


@pytest.mark.parametrize("seeds", seeds_of(6, SEEDS))
def test_the_core_as_it_is_passes_these_seeds(seeds: range) -> None:
    failures = {seed: failure for seed in seeds if (failure := Trial(seed, "dora").run())}
    assert not failures


@pytest.mark.parametrize("bug", marked(BUGS))
def test_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first seed that sees the bug says what is wrong, and passes again once the bug has gone."""
    bug.plant(monkeypatch)
    trials = (Trial(seed, "dora", bug.kinds, window=bug.window) for seed in bug.seeds)
    trial, found = next(((trial, failure) for trial in trials if (failure := trial.run())), (None, None))
    assert trial is not None and found is not None, f"unseen for {SEEDS} seeds: {bug.what}"
    assert any(words in found.message for words in bug.caught.split("|")), found.message
    monkeypatch.undo()
    assert trial.run() is None, "the seed fails without the bug, too"
