"""Reports on a run from its record, its processes and its faults: ``out/chaos/report.json``."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Final

import numpy as np

from dora.data.run_record import TRAJECTORIES_FILE, VERSIONS_FOLDER
from dora.data.trajectory import Trajectory
from dora.ops.verify import verify
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.tolerances import FLOAT32
from dora.rpc import dora_pb2 as pb
from dora.worker.fake.engine import FakeEngine
from tests import promises, session_audit
from tests.chaos import breaking, chats
from tests.chaos.faults import ACTIONS
from tests.chaos.setting import GROUP_SIZE, WINDOW, Setting
from tests.chaos.strikes import Struck
from tests.chaos.world import World
from tests.contract.driver import ROUNDING, run

OF_CHATS: Final = ("chat_turns_lost", "chat_turns_twice")
MUST_BE_0: Final = (*promises.MUST_BE_0, "logprob_mismatches", *session_audit.MUST_BE_0, *OF_CHATS)
_VERIFIED_AT_ONCE: Final = 256


def report_of(world: World, struck: Struck, status: pb.Status | None, stuck: str) -> dict[str, Any]:
    """``status``: at the end, once all was trained on; None: it did not come to that. ``stuck``: why."""
    setting, counters = world.setting, dict(status.counters) if status is not None else {}
    submitting = world.submitting
    opened = world.environment.opened | world.chats.opened
    prompts = submitting.accepted | opened if status is not None else set()  # else the last ones have had no chance
    of_record = [*read_trajectories(setting.record / TRAJECTORIES_FILE)]
    alone = {each.prompt_id for each in of_record if chats.is_chat(each.prompt_id)} | world.chats.opened
    found = promises.promises(setting.record, prompts, world.trainer.trained, WINDOW, GROUP_SIZE, alone)
    mismatches, violations = _verified(setting)
    sessions = session_audit.sessions_of(of_record)
    of_chats = [each for each in sessions if chats.is_chat(each[0].prompt_id)]
    driven = [each for each in sessions if not chats.is_chat(each[0].prompt_id)]
    of_breaking = [each for each in driven if breaking.is_breaking(each[0].prompt_id)]
    driven = [each for each in driven if not breaking.is_breaking(each[0].prompt_id)]
    sessions_wrong = [
        *session_audit.all_wrong(driven),
        *filter(None, map(chats.wrong, of_chats)),
        *filter(None, map(breaking.wrong, of_breaking)),
    ]
    breaks = len([*setting.breaks.iterdir()])  # each costs the session whose code ran, and no other
    counters["sessions_replaced"] = max(0, counters.get("sessions_replaced", 0) - breaks)
    of_action = Counter(name.partition(" ")[0] for name in (*struck.kills, *struck.faults))
    report: dict[str, Any] = {
        "kills": len(struck.kills),
        "faults": len(struck.faults),
        "fault_counts": {action: of_action[action] for action in ACTIONS},
        "packets_cut": world.link.packets_cut if world.link else 0,
        "lost": found.lost + GROUP_SIZE * int(counters.get("groups_lost", 0)),
        "duplicated": found.duplicated,
        "c1_violations": found.c1_violations + int(counters.get("c1_violations", 0)),
        "c3_violations": found.c3_violations,
        "logprob_mismatches": mismatches,
        **session_audit.audited(sessions, counters, sessions_wrong),
        **chats.counted(of_chats),
        "groups_opened": len(opened),
        "sessions_of_environments": len(of_breaking),
        "environments_broken": breaks,
        "worker_recovery_s_p95": _percentile(struck.worker_recovery_s, 95),
        "worker_recovery_s_p50": _percentile(struck.worker_recovery_s, 50),
        "orchestrator_restart_s": _percentile(struck.orchestrator_restart_s, 95),
        "orchestrator_restart_s_p50": _percentile(struck.orchestrator_restart_s, 50),
        "whole_again_s_p50": _percentile(struck.whole_again_s, 50),
        "rss_growth": dict(_growth(world.processes)),
        "missed": struck.missed,
        "phases_held": dict(world.phases),
        "trajectories": found.trajectories,
        "steps": len({step for step, _ in world.trainer.trained}),
        "lives": world.incarnations,
        "struck": dict(sorted(Counter([*struck.kills, *struck.faults]).items())),
        "counters": {name: value for name, value in counters.items() if value},
    }
    broken = [f"{name} is {report[name]}" for name in MUST_BE_0 if report[name]]
    report["failures"] = [*([stuck] if stuck else []), *broken, *sessions_wrong, *violations]
    return report


def not_struck(struck: Struck, kills: int) -> list[str]:
    """A sentence if less was struck than was asked for. ``kills`` 0: any fault."""
    if not struck.kills and not struck.faults:
        return [f"nothing was struck, and {len(struck.missed)} faults were missed"]
    return [f"{len(struck.kills)} of {kills} kills came"] if len(struck.kills) < kills else []


def _verified(setting: Setting) -> tuple[int, tuple[str, ...]]:
    """Trajectories with a logprob that their version does not give, and what else is wrong with the record."""
    if setting.engine == "fake":
        return sum(_mismatches(setting)), ()
    found = verify(setting.record, atol=FLOAT32.atol, window_versions=WINDOW)
    return found.logprob_mismatches, found.violations


def _mismatches(setting: Setting) -> Iterator[bool]:
    """Returns, for each trajectory of fake engines, whether it differs from one that nothing befell."""
    of_version: dict[int, list[Trajectory]] = defaultdict(list)
    for each in read_trajectories(setting.record / TRAJECTORIES_FILE):
        of_version[each.behaviour_version].append(each)
    for version, trajectories in sorted(of_version.items()):
        engine = FakeEngine(slots=_VERIFIED_AT_ONCE, kv_tokens=1 << 20, max_model_len_tokens=512, model=setting.model)
        folder = setting.record / VERSIONS_FOLDER / str(version)
        engine.load_weights(version, folder if version else setting.model, None)
        for first in range(0, len(trajectories), _VERIFIED_AT_ONCE):
            yield from _differ(engine, trajectories[first : first + _VERIFIED_AT_ONCE])


def _differ(engine: FakeEngine, trajectories: Sequence[Trajectory]) -> Iterator[bool]:
    limits = {each.trajectory_id: chats.TURN_TOKENS * chats.is_chat(each.prompt_id) for each in trajectories}
    turns = {each.trajectory_id: session_audit.requests_of(each, limits[each.trajectory_id]) for each in trajectories}
    found = run(engine, [request for requests in turns.values() for request, _, _ in requests])
    for each in trajectories:
        for request, begin, end in turns[each.trajectory_id]:
            response = found[request.request_id]
            token_ids, logprobs = response.token_ids[begin:], response.logprobs[begin:]
            if token_ids != each.response_token_ids[begin:end].tolist() or not np.allclose(
                logprobs, each.logprobs[begin:end], rtol=0, atol=ROUNDING
            ):
                yield True
                break
        else:
            yield False


def _percentile(values: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 2) if values else 0.0


def _growth(weighed: Iterable[tuple[float, str, int, int]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each role the resident megabytes in the first and in the last quarter of the looks at it, medians; and of its
    process that lived longest, from the first third of its life to its end."""
    of_role: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
    for at_s, name, pid, resident in weighed:
        of_role[name].append((at_s, pid, resident))
    for name, looks in sorted(of_role.items()):
        quarter = max(len(looks) // 4, 1)
        first, last = (median(each[2] for each in part) / 1e6 for part in (looks[:quarter], looks[-quarter:]))
        incarnations: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for at_s, pid, resident in looks:
            incarnations[pid].append((at_s, resident))
        longest = max(incarnations.values(), key=lambda incarnation: incarnation[-1][0] - incarnation[0][0])
        yield (
            name,
            {
                "first_mb": round(first, 1),
                "last_mb": round(last, 1),
                "growth_mb": round(last - first, 1),
                "longest_life_s": round(longest[-1][0] - longest[0][0], 1),
                "longest_life_growth_mb": round((longest[-1][1] - longest[len(longest) // 3][1]) / 1e6, 1),
            },
        )
