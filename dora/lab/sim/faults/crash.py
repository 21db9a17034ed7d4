"""Crashes of the orchestrator: it restarts with a prefix of its journal, while workers and pools survive.

Everything in transit is lost: messages, verdicts, prompts that were being drawn. Some workers reconnect at once, so
that the new core's first event names them. Others reconnect later, or never. They have continued generating meanwhile.
Each surviving process gets a new epoch.
"""

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Final

import numpy as np

from dora.core import Machine
from dora.core import events as on
from dora.core.rules import restoring
from dora.core.rules.admission import attempt_id
from dora.core.rules.selection import REDUNDANT
from dora.journal.records import CLOSED
from dora.lab.sim.faults.fault import Fault
from dora.lab.sim.faults.service import PersistedState, cut
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.ledger import Lost, SimGroup, SimLedger, SimResponse, Violation
from dora.lab.sim.worker import SimWorker
from dora.lab.sim.workload import SimPrompt
from dora.orchestrator.recovery.reattachment import without_doubles
from dora.orchestrator.rollout.responses.session_paths import runs_of

DIE: Final = 0.15  # share of workers and pools that end with it
LATE: Final = 0.35  # share of the survivors that reconnect after the core has begun
LATE_MOST_S: Final = 20.0
SAME: Final = (  # restored fields that must equal the core's own if no record was lost
    *("newest", "step", "left", "groups_per_step", "window_versions", "retired", "trainer_epoch", "leased"),
    *("left_behind", "short_step", "rejected"),
)


def crash(world: UnreliableWorld, fault: Fault) -> None:
    """Crashes the orchestrator now. ``amount`` is the share that it keeps of the records that may be lost."""
    world.check_replay()
    log, random = world.logged, Random(f"crash {fault.at_s} {fault.subject}")
    count = log.relied_on + round(fault.amount * (log.appended - log.relied_on))
    persisted = world.service.persisted(count)
    if count == log.appended:
        check_persisted(world.machine, persisted)
    cut(log, count, world.incarnation + 1)
    world.prompts_again += rewind(world.ledger, world.archive, world.dropped, persisted)
    members = _members(world, random)
    world.begin_incarnation(persisted)
    at_once = [worker for worker, late_s in members if not late_s]
    restored = with_members(persisted.restored, [world.hello(worker) for worker in at_once])
    for worker in at_once:
        world.enter(worker)
    world.post(restored)
    for worker in at_once:
        world.welcome(worker)
    for worker, late_s in members:
        if late_s:
            world.after(late_s, world.come_back, worker)
    world.carry_on()


def _members(world: UnreliableWorld, random: Random) -> list[tuple[SimWorker, float]]:
    """Returns the survivors, each with the seconds until it returns; 0 is in time to be expected. The launcher starts
    the other processes again.
    """
    found: list[tuple[SimWorker, float]] = []
    for worker in [*world.workers.values(), *world.pools.values()]:
        hung_s = world.session(worker).hung_until_s - world.now_s
        late_s = hung_s if hung_s > 0.0 else random.random() * LATE_MOST_S if random.random() < LATE else 0.0
        if world.outlives(worker, random.random() >= DIE):
            found.append((world.reborn(worker), late_s))
    return found


def check_persisted(machine: Machine, persisted: PersistedState) -> None:
    """If no record is lost, the journal must restore the state that the core reports. Raises Violation."""
    durable, found = restoring.durable(machine.state), persisted.restored
    differing = [name for name in SAME if getattr(durable, name) != getattr(found, name)]
    by_name = {group.group_id: group for group in found.groups}
    differing += [
        each.group_id
        for each in durable.groups
        if each.group_id not in by_name or _persisted_of(by_name[each.group_id]) != _persisted_of(each)
    ]
    no_inputs = np.zeros(0, np.int32)  # the journal does not say whether a worker has the environment tokens of a turn
    requests = [replace(each.requests, given=no_inputs) for each in (durable, found)]
    if requests[0] != requests[1] or sorted(durable.finished) != sorted(found.finished):
        differing.append("requests")
    if differing or len(durable.groups) != len(by_name):
        raise Violation(f"the journal says otherwise than the core of {', '.join(differing) or 'groups'} (C2)")


def _persisted_of(group: on.RestoredGroup) -> tuple[int, tuple[float, ...]]:
    return group.deadline, group.rewards


def rewind(
    ledger: SimLedger,
    archive: dict[str, tuple[SimGroup, list[SimResponse]]],
    dropped: dict[str, str],
    persisted: PersistedState,
) -> list[SimPrompt]:
    """Rewinds the ledger to the kept records. Returns the prompts to draw again: those on offer, and those of groups
    whose admission was lost.

    ``archive`` has all groups that ever existed, ``dropped`` the reasons of the dropped ones. Raises Lost if a record
    that others relied on is missing.
    """
    names = {group.group_id for group in persisted.groups}
    unsaid = [group_id for group_id in ledger.groups if group_id not in names]
    if taken := [group_id for group_id in unsaid if group_id in ledger.received]:
        raise Lost(f"{', '.join(taken)}: in the trainer's hands, and the journal does not know them (C2)")
    again = [*(ledger.groups[group_id].prompt for group_id in unsaid), *ledger.offered.values()]
    ledger.offered.clear()
    for group_id in unsaid:
        for request_id in ledger.groups.pop(group_id).request_ids:
            del ledger.responses[request_id]
    ledger.admitted -= len(unsaid)
    counts, ends = persisted.restored.requests.tokens.tolist(), persisted.requests.ends.tolist()
    position = 0
    for live in persisted.groups:
        group, responses = archive[live.group_id]
        if live.group_id not in ledger.groups:  # the record of its drop was lost
            reason = dropped.pop(live.group_id)
            ledger.cancelled -= 1
            ledger.cancel_reasons[reason] -= 1
            ledger.redundant[ledger.steps] -= reason == REDUNDANT
            ledger.groups[live.group_id] = group
            ledger.responses.update(zip(group.request_ids, responses, strict=True))
        group.step, group.started = live.step, group.prompt.at_once
        group.unscored, group.rewards = group.started, set()
        if group.prompt.sessions:
            responses = _sessions_again(ledger, live.group_id, group, persisted, position)
            archive[live.group_id] = group, responses
        for response in responses:
            if counts[position] > response.tokens:
                raise Violation(
                    f"{live.group_id} has {counts[position]} tokens in the journal, of {response.tokens} (C2)"
                )
            response.tokens, response.finished = counts[position], bool(ends[position]) and not response.idle
            verdict = persisted.requests.verdicts.get(position)
            group.unscored -= verdict is not None
            group.rewards |= {verdict.value} if verdict is not None and verdict.valid else set()
            position += 1
        group.grow()
    if {each.version for each in persisted.restored.rejected} != ledger.rejected:
        raise Violation(f"{sorted(ledger.rejected)} are rejected, and the journal does not know it")
    ledger.window = persisted.restored.window_versions
    ledger.received = []
    _end_evaluations(ledger)
    return again


def _sessions_again(
    ledger: SimLedger, group_id: str, group: SimGroup, persisted: PersistedState, position: int
) -> list[SimResponse]:
    """Returns a group's sessions as the kept records have them, from ``position`` on; replacements may be lost."""
    again: dict[str, SimResponse] = {}
    for index in range(len(group.request_ids)):
        at = position + index
        name = attempt_id(f"{group_id}.{index}", int(persisted.requests.attempts[at]))
        before = ledger.responses.get(name)
        response = again[name] = SimResponse.of(group_id, group.version, index, group.prompt)
        runs, end = runs_of(persisted.requests.turns.get(at, ())), int(persisted.requests.ends[at])
        response.turn += len(runs)
        response.forked = bool(runs) and runs[-1].is_fork
        response.tokens = before.tokens if before is not None else int(persisted.restored.requests.tokens[at])
        response.ended, response.idle = end >= CLOSED, 0 < end < CLOSED or (not end and response.turn < 0)
    for request_id in group.request_ids:
        ledger.responses.pop(request_id, None)
    group.request_ids = tuple(again)
    ledger.responses.update(again)
    return list(again.values())


def _end_evaluations(ledger: SimLedger) -> None:
    for evaluation in ledger.evaluations.values():
        evaluation.ended = True
        for group in evaluation.groups.values():
            for request_id in group.request_ids:
                del ledger.responses[request_id]
        evaluation.groups.clear()


def with_members(restored: on.Restored, joined: Iterable[on.WorkerJoined | on.PoolJoined]) -> on.Restored:
    """The event with the members that have reconnected in time."""
    events = list(joined)
    workers = tuple(without_doubles(event for event in events if isinstance(event, on.WorkerJoined)))
    return replace(restored, workers=workers, pools=tuple(each for each in events if isinstance(each, on.PoolJoined)))
