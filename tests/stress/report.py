"""Checks a run's record against the promises, alone and together with the requests and the trainer's account."""

from collections.abc import Set
from pathlib import Path
from typing import Any, Final

from dora.data.run_record import TRAJECTORIES_FILE
from dora.ops.verify import verify
from dora.ops.verify.check import Progress, read_trajectories
from dora.ops.verify.tolerances import FLOAT32
from tests import promises, session_audit
from tests.stress.load import GROUP_SIZE
from tests.stress.run import WINDOW, Seen

MUST_BE_0: Final = (*promises.MUST_BE_0, "logprob_mismatches", *session_audit.MUST_BE_0, "kv_blocks_left")
SUMMED: Final = ("trajectories", "sessions", "branches", "turns", *MUST_BE_0, "migrations_kv", "tokens_reprefilled")


def model_report(record: Path, prompts: Set[str], seen: Seen, progress: Progress) -> dict[str, Any]:
    """The report's fields of one model, and why it failed, in sentences."""
    found = promises.promises(record, prompts, seen.trained, WINDOW, GROUP_SIZE)
    verified = verify(record, atol=FLOAT32.atol, window_versions=WINDOW, progress=progress)
    counters = seen.counters
    sessions = session_audit.sessions_of(read_trajectories(record / TRAJECTORIES_FILE))
    sessions_wrong = session_audit.all_wrong(sessions)
    report: dict[str, Any] = {
        "trajectories": found.trajectories,
        "lost": found.lost + GROUP_SIZE * int(counters["groups_lost"]),
        "duplicated": found.duplicated,
        "c1_violations": found.c1_violations + int(counters["c1_violations"]),
        "c3_violations": found.c3_violations,
        "logprob_mismatches": verified.logprob_mismatches,
        **session_audit.audited(sessions, counters, sessions_wrong),
        "migrations_kv": int(counters["migrations_kv"]),
        "tokens_reprefilled": int(counters["tokens_reprefilled"]),
        "kv_blocks_left": seen.kv_blocks_left,
        "parked_left": seen.parked_left,
        "requests_parked": int(counters["requests_parked"]),
        "migrations_reprefill": int(counters["migrations_reprefill"]),
        "migrations_failed": int(counters["migrations_failed"]),
        "staleness_max": int(counters["staleness_max"]),
        "versions": len(verified.versions),
        "steps": verified.steps,
        "tokens": verified.tokens,
        "router_ties": verified.router_ties,
        "logprob_diff_max": verified.max_abs_diff,
        "rebalances": seen.rebalances,
        "worker_kills": seen.worker_kills,
        "workers_lost": int(counters["workers_lost"]),
        "trainer_kills": seen.trainer_kills,
    }
    wrong = [f"{name} is {report[name]}" for name in (*MUST_BE_0, "parked_left") if report[name]]
    report["failures"] = [*wrong, *sessions_wrong, *verified.violations]
    return report


def not_killed(seen: Seen, worker_kills: int, trainer_kills: int) -> list[str]:
    """A sentence for each kind of kill that was asked for and did not happen."""
    kinds = (("workers", seen.worker_kills, worker_kills), ("trainers", seen.trainer_kills, trainer_kills))
    return [f"{killed} of {asked} {kind} were killed" for kind, killed, asked in kinds if killed < asked]


def whole_report(models: dict[str, dict[str, Any]], asked: int) -> dict[str, Any]:
    """All models' together. ``asked``: trajectories of each."""
    failures = [f"{name}: {failure}" for name, each in models.items() for failure in each["failures"]]
    failures += [
        f"{name}: {each['trajectories']} trajectories instead of {asked}"
        for name, each in models.items()
        if each["trajectories"] != asked
    ]
    return {
        **{name: sum(each[name] for each in models.values()) for name in SUMMED},
        "failures": failures,
        "models": models,
    }
