"""Handoffs between two loaded workers, many at once, each command given and each handoff undone at a step of a seed's.

The orchestrator's own table says what follows on what; nothing else of it takes part. Workers have fewer slots than
requests, and less KV than these come to, so requests wait, are preempted, and end while they move.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dora.core.handoff.table import LIVE, Action, Handoff, Phase, Signal
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.worker.fake.engine import FakeEngine
from tests.abuse.kv.mill import RESPONSES, Account, Mill, an_engine, request_of
from tests.contract.planes import End
from tests.contract.workers import Worker

SLOTS: Final = 5
KV_TOKENS: Final = 640  # less than the four longest want at their ends, and what is reserved
RUNNING: Final = 4
AT_ONCE: Final = 4
DELAY_MAX: Final = 6  # steps before a command is given
UNDONE_SHARE: Final = 0.3
UNDONE_WITHIN: Final = 30  # steps
AWAITED_SHARE: Final = 0.3  # of steps after which what travels is waited for


@dataclass
class Live:
    """One handoff under way."""

    handoff: Handoff
    source: int  # of the two workers
    due: int = 0  # the step at which the next command is given
    undo: int = 0  # the step at which it is undone; 0: it is not
    waits_for: tuple[int, int] = (0, 0)  # worker and number of a command that was given
    next: Callable[["Live"], None] | None = None  # what is due


def small_engine(model: Path) -> FakeEngine:
    return an_engine(model, SLOTS, KV_TOKENS)


class Timed(Mill):
    """``turn`` is one step of both workers."""

    def __init__(self, ends: tuple[End, End], model: Path, chance: random.Random) -> None:
        self.live: dict[str, Live] = {}
        self.outcomes: Counter[str] = Counter()  # of handoffs
        self._step = 0
        self._later: dict[tuple[int, int], tuple[str, Callable[[], object]]] = {}  # when a command was obeyed
        super().__init__(ends, model, chance, lambda end: end.address, small_engine, RUNNING)

    def tend(self) -> None:
        for name in [name for name, at in self.at.items() if self.workers[at].ends.get(name)]:
            if name not in self.live and not self._is_called(name):
                self._compare(name)
        for index, worker in enumerate(self.workers):
            while sum(at == index for at in self.at.values()) < self._running:
                number = self._started % RESPONSES
                request = replace(request_of(number), request_id=f"{number}.{self._started}")
                self._started += 1
                worker.order(start_request=convert.request_to_wire(request))
                self.at[request.request_id] = index

    def begin(self) -> bool:
        """Another handoff, where there is room for one."""
        free = [
            name
            for name, at in self.at.items()
            if name not in self.live and not self._is_called(name) and not self.workers[at].ends.get(name)
        ]
        if len(self.live) >= AT_ONCE or not free:
            return False
        name = self._chance.choice(sorted(free))
        source = self.at[name]
        live = Live(Handoff(0, name, f"w{source}", f"w{1 - source}", 0.0), source, self._step)
        if self._chance.random() < UNDONE_SHARE:
            live.undo = self._step + self._chance.randint(1, UNDONE_WITHIN)
        self.live[name] = live
        live.next = self._reserve
        return True

    def turn(self) -> None:
        self._step += 1
        for live in list(self.live.values()):
            self._advance(live)
        for worker in self.workers:
            worker.turn()
            if self._chance.random() < AWAITED_SHARE:
                worker.await_sent()
        for (index, number), (_, then) in list(self._later.items()):
            if number in self.workers[index].outcomes:
                del self._later[index, number]
                then()
        self.tend()

    def finish(self) -> Account:
        """Lets all handoffs come to their end, and nothing new begin."""
        self._running = 0
        while self.live or self._later:
            self.turn()
        return super().finish()

    # One handoff.

    def _advance(self, live: Live) -> None:
        name, source = live.handoff.request_id, self.workers[live.source]
        if live.handoff.phase in LIVE and source.ends.get(name):
            self._signal(live, Signal.FINISHED)
        elif live.handoff.phase in LIVE and live.undo and self._step >= live.undo:
            self._signal(live, Signal.UNDO)
        elif live.next is not None and self._step >= live.due:
            due, live.next = live.next, None
            due(live)
        index, number = live.waits_for
        if live.handoff.phase is Phase.RESERVED and number in self.workers[index].began:
            self._signal(live, Signal.COPY_BEGAN)
        if name in self.live and number and number in self.workers[index].outcomes:
            live.waits_for = (0, 0)
            self._done(live, self.workers[index].outcomes.pop(number))

    def _done(self, live: Live, outcome: pb.WorkerOutcome) -> None:
        phase = live.handoff.phase
        if phase is Phase.PLANNED:
            self._signal(live, Signal.RESERVED if outcome.ok else Signal.REFUSED)
        elif phase in (Phase.RESERVED, Phase.COPYING):
            live.handoff.locator = outcome.locator
            failed = Signal.NOT_MOVABLE if outcome.error_kind == "not_movable" else Signal.COPY_FAILED
            self._signal(live, Signal.FROZEN if outcome.ok else failed)
        elif phase is Phase.FROZEN:
            failed = Signal.NOT_MOVABLE if outcome.error_kind == "not_movable" else Signal.COPY_REFUSED
            self._signal(live, Signal.COPIED_IN if outcome.ok else failed)
        else:
            self._signal(live, Signal.SOURCE_FREED)

    def _signal(self, live: Live, signal: Signal) -> None:
        name, phase = live.handoff.request_id, live.handoff.phase
        for action in live.handoff.advance(signal):
            _ACTIONS[action](self, live)
        if live.handoff.phase in (Phase.ABORTED, Phase.RELEASED):
            del self.live[name]
            self.outcomes["moved" if live.handoff.phase is Phase.RELEASED else f"{signal.name} in {phase.name}"] += 1

    def _soon(self, live: Live, then: Callable[[Live], None]) -> None:
        live.next, live.due = then, self._step + self._chance.randint(0, DELAY_MAX)

    def _order(self, live: Live, index: int, **kind: object) -> None:
        """Gives a command whose outcome the handoff waits for."""
        live.waits_for = (index, self.workers[index].order(**kind))

    def _reserve(self, live: Live) -> None:
        name, source = live.handoff.request_id, self.workers[live.source]
        assert source.end is not None
        spec = request_of(int(name.partition(".")[0]))
        kv_tokens = len(spec.prompt_token_ids) + len(source.tokens.get(name, []))
        epoch = source.end.identity.epoch
        reserve = pb.ReserveSlot(request_id=name, version=1, kv_tokens=kv_tokens, source_epoch=epoch)
        self._order(live, 1 - live.source, reserve_slot=reserve)

    def _copy_out(self, live: Live) -> None:
        order = pb.CopyOut(request_id=live.handoff.request_id, target=self._peers[1 - live.source])
        self._order(live, live.source, copy_out=order)

    def _copy_in(self, live: Live) -> None:
        name = live.handoff.request_id
        self._hand_over(name, self.workers[live.source], self.workers[1 - live.source])
        order = pb.CopyIn(request_id=name, version=1, locator=live.handoff.locator)
        self._order(live, 1 - live.source, copy_in=order)

    def _commit(self, live: Live) -> None:
        self.at[live.handoff.request_id] = 1 - live.source

    def _free_source(self, live: Live) -> None:
        self._order(live, live.source, remove_request=pb.RemoveRequest(request_id=live.handoff.request_id))

    def _thaw_source(self, live: Live) -> None:
        self.workers[live.source].order(thaw=pb.Thaw(request_id=live.handoff.request_id))

    def _cancel_target(self, live: Live) -> None:
        """Cancels at the target. Its earlier reports count for nothing."""
        name, index = live.handoff.request_id, 1 - live.source
        target = self.workers[index]
        number = target.order(cancel_reservation=pb.CancelReservation(request_id=name))
        self._later[index, number] = name, lambda: _forget(target, name)

    def _restart_at_target(self, live: Live) -> None:
        """Once its source has freed it, so that all tokens that it has told are known."""
        name, source, target = live.handoff.request_id, self.workers[live.source], self.workers[1 - live.source]
        number = source.order(remove_request=pb.RemoveRequest(request_id=name))

        def restart() -> None:
            if source.ends.get(name):
                return
            self._hand_over(name, source, target)
            spec = replace(
                request_of(int(name.partition(".")[0])),
                request_id=name,
                output_token_ids=tuple(target.tokens[name]),
                logprobs=tuple(target.logprobs[name]),
            )
            target.order(start_request=convert.request_to_wire(spec))
            self.at[name] = 1 - live.source
            self.account.reprefilled += 1

        self._later[live.source, number] = name, restart

    def _is_called(self, name: str) -> bool:
        """Whether a command on it is still to be obeyed."""
        return any(name == other for other, _ in self._later.values())


def _forget(worker: Worker, name: str) -> None:
    for told in (worker.tokens, worker.logprobs, worker.ends):
        told.pop(name, None)


_ACTIONS: Final[dict[Action, Callable[[Timed, Live], None]]] = {
    Action.COPY_OUT: lambda world, live: world._soon(live, world._copy_out),
    Action.COPY_IN: lambda world, live: world._soon(live, world._copy_in),
    Action.COMMIT: Timed._commit,
    Action.FREE_SOURCE: lambda world, live: world._soon(live, world._free_source),
    Action.THAW_SOURCE: Timed._thaw_source,
    Action.CANCEL_TARGET: Timed._cancel_target,
    Action.RESTART_AT_TARGET: Timed._restart_at_target,
    Action.RELEASE_SNAPSHOT: lambda _world, _live: None,
}
