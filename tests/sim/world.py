"""A small seeded world around the core: workers, verifier and trainer that act, lag, fail and die in random order.

Messages between the core and one worker keep their order (as on one stream); everything else interleaves at random. The
world keeps its own books, so what it checks does not come from the core's.
"""

import random

from dora.config import validated
from dora.errors import DoraError
from dora.orchestrator.core import Machine
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.sim.invariants import check_state, fingerprint
from tests.sim.workers import SimWorker


class World:
    """Drives one Machine. ``faults`` is the chance of each fault where it could happen."""

    def __init__(
        self,
        seed: int,
        *,
        window: int,
        groups: int,
        group_size: int,
        workers: int,
        faults: float,
        policy: str = "dora",
    ) -> None:
        self.random = random.Random(seed)
        balance = {"policy": policy, "period_s": 7.0, "handoff_timeout_s": 9.0}
        self.machine = Machine(validated({"window": {"size": window}, "balance": balance}))
        self.window, self.groups, self.group_size, self.faults = window, groups, group_size, faults
        self.now_s = 0.0
        self.workers: dict[str, SimWorker] = {}
        self.epochs = 0
        self.names = [f"w{i}" for i in range(workers)]
        self.calls: list = []  # verifier and prompt calls in flight
        self.lengths: dict[str, int] = {}  # request -> response length
        self.versions: dict[str, int] = {}
        self.book: dict[str, int] = {}  # request -> tokens delivered
        self.group_of: dict[str, str] = {}
        self.members: dict[str, tuple[str, ...]] = {}
        self.delivered: dict[str, int] = {}  # group -> step, from the first delivery
        self.trained: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.snapshots: dict[str, tuple[str, int, int]] = {}  # locator -> request, tokens, version
        self.retired: set[int] = set()
        self.prompts_left: int | None = None  # None: without end
        self.ended = False  # the trainer was told that there are no more prompts
        self.trainer_epoch = 0
        self.step_open: int | None = None
        self.step_ready: int | None = None
        self.received: dict[int, list[str]] = {}  # step -> groups in this stream
        self.events = 0
        self.attach()
        for name in self.names:
            self.join(name)

    # --------------------------------------------------------------------------------------------------------- driver

    def handle(self, event: on.Event) -> None:
        self.events += 1
        self.now_s += self.random.random() * 0.2
        if isinstance(event, on.Progress):
            self.deliver_tokens(event)
        commands = self.machine.handle(event, self.now_s)
        for command in commands:
            self.execute(command)
        check_state(self.machine.state)

    def run(self, events: int) -> None:
        while self.events < events:
            self.act()

    def settle(self, steps: int) -> None:
        """No more faults: the trainer must get its next ``steps`` steps within a bounded number of actions."""
        self.faults = 0.0
        goal = max(self.trained.values(), default=-1) + steps
        for _ in range(60_000):
            self.act()
            if max(self.trained.values(), default=-1) >= goal:
                return
        state = self.machine.state
        raise AssertionError(
            f"stalled at step {state.window.step}, slack {state.window.slack()}: "
            f"{[(w.worker_id, w.loaded, w.target, w.loading, len(w.rows), w.inbound) for w in state.workers.values()]} "
            f"waiting { {v: len(r) for v, r in state.waiting.items()} } handoffs {list(state.handoffs.values())}"
        )

    def finish(self) -> None:
        """No more faults and no more prompts: the trainer must get all that was admitted, and see the end."""
        self.faults = 0.0
        for _ in range(60_000):
            if self.ended and self.step_ready is None:
                break
            self.act()
        state = self.machine.state
        assert self.ended, f"no end at step {state.window.step}: open {state.window.open_groups}, {state.drawing}"
        assert self.members.keys() == self.trained.keys() | self.cancelled
        assert not (state.group_row or state.request_row or state.handoffs)

    def act(self) -> None:
        choice = self.random.random()
        workers = list(self.workers.values())
        if choice < 0.55 and workers:
            worker = self.random.choice(workers)
            kind = self.random.random()
            if kind < 0.35 and worker.inbox:
                worker.obey(self, worker.inbox.popleft())
            elif kind < 0.7 and worker.outbox:
                self.handle(worker.outbox.popleft())
            else:
                worker.decode(self)
        elif choice < 0.75 and self.calls:
            self.handle(self.calls.pop(self.random.randrange(len(self.calls))))
        elif choice < 0.85:
            self.train()
        elif choice < 0.9:
            self.now_s += self.random.random() * 4
            self.handle(on.Tick())
        elif self.random.random() < self.faults:
            self.fail()
        else:
            missing = [name for name in self.names if name not in self.machine.state.workers]
            if missing:
                self.join(self.random.choice(missing))

    # --------------------------------------------------------------------------------------------------------- actors

    def join(self, name: str) -> None:
        self.epochs += 1
        self.workers[name] = SimWorker(name, self.epochs)
        self.handle(on.WorkerJoined(name, self.epochs, slots=6, kv_tokens=400))

    def kill(self, name: str) -> None:
        worker = self.workers.pop(name)
        for event in list(worker.outbox)[: self.random.randrange(len(worker.outbox) + 1)]:
            self.handle(event)  # what was on the wire may still arrive
        self.handle(on.WorkerLost(name, worker.epoch, "killed"))

    def attach(self) -> None:
        self.trainer_epoch += 1
        self.step_open = self.step_ready = None
        self.received.clear()
        self.handle(on.TrainerAttached(self.trainer_epoch, self.groups))

    def train(self) -> None:
        if self.step_ready is not None:
            step, self.step_ready = self.step_ready, None
            groups = self.received.pop(step)
            assert len(groups) == len(set(groups)), f"step {step} holds {groups}"
            for group in groups:
                assert group not in self.trained, f"{group} was trained twice"
                self.trained[group] = step
            self.handle(on.StepCommitted(self.trainer_epoch, step))
        elif self.step_open is None and not self.ended:
            self.step_open = self.machine.state.window.newest
            self.received[self.step_open] = []
            self.handle(on.StepRequested(self.trainer_epoch, self.step_open))

    def fail(self) -> None:
        kind = self.random.random()
        state = self.machine.state
        if kind < 0.35 and self.workers:
            self.kill(self.random.choice(sorted(self.workers)))
        elif kind < 0.45:
            self.attach()
        elif kind < 0.5 and self.step_open is not None:  # its stream broke: the same trainer asks again
            self.received[self.step_open] = []
            self.handle(on.StepRequested(self.trainer_epoch, self.step_open))
        elif kind < 0.65 and state.group_row:
            group = self.random.choice(sorted(state.group_row))
            self.expect_refusal(on.GroupCancelled(group, "asked for"))
        elif kind < 0.75 and self.workers and state.request_row:
            request = self.random.choice(sorted(state.request_row))
            self.expect_refusal(on.MigrateAsked(request, self.random.choice(sorted(self.workers))))
        elif kind < 0.8 and self.workers:
            self.expect_refusal(on.DrainAsked(self.random.choice(sorted(self.workers))))
        elif kind < 0.85:
            self.handle(on.RebalanceAsked())
        else:
            self.disturb()

    def disturb(self) -> None:
        """What is wrong or late: ignored, or refused whole."""
        window, name = self.machine.state.window, self.random.choice(self.names)
        self.expect_refusal(
            self.random.choice(
                (
                    on.Progress(name, 0, 0, {"g0.0": 7}, {"g0.0": "stop"}),
                    on.CommandDone(name, 0, self.machine.state.commands_sent),
                    on.CommandDone(name, self.epochs, 0),
                    on.WorkerLost(name, 0, "of an epoch that is over"),
                    on.WorkerJoined(name, self.epochs + 1, 6, 400) if name in self.workers else on.Tick(),
                    on.RequestScored("g0.0") if "g0.0" not in self.machine.state.request_row else on.Tick(),
                    on.StepRequested(self.trainer_epoch - 1, window.newest),
                    on.StepRequested(self.trainer_epoch, window.newest + 1),
                    on.StepCommitted(self.trainer_epoch, window.newest + 1),
                    on.StepCommitted(self.trainer_epoch - 1, window.newest),
                    on.TrainerAttached(self.trainer_epoch, self.groups),
                    on.TrainerAttached(self.trainer_epoch + 1, self.groups + 1),
                    on.PromptsOffered((on.OfferedPrompt("p", "task", 5, 1, 60),) * 999),
                    on.GroupCancelled("g-none", "asked for"),
                )
            )
        )

    def expect_refusal(self, event: on.Event) -> None:
        """What may be refused; then nothing has changed."""
        before = fingerprint(self.machine.state)
        try:
            self.handle(event)
        except DoraError:
            after = fingerprint(self.machine.state)
            assert after == before, f"{event} was refused, yet changed {[k for k in before if before[k] != after[k]]}"

    # ------------------------------------------------------------------------------------------------------- commands

    def execute(self, command: do.Command) -> None:
        match command:
            case do.DrawPrompts(count=count):
                self.calls.append(self.offer(count))
            case do.AdmitGroup(group_id=group_id, version=version, request_ids=request_ids):
                self.members[group_id] = request_ids
                for request_id in request_ids:
                    self.lengths[request_id] = 60 if self.random.random() < 0.1 else self.random.randrange(1, 20)
                    self.versions[request_id], self.book[request_id] = version, 0
                    self.group_of[request_id] = group_id
            case do.ScoreRequest(request_id=request_id):
                assert self.book[request_id] == self.lengths[request_id], f"{request_id} was scored incomplete"
                self.calls.append(on.RequestScored(request_id))
            case do.DropGroup(group_id=group_id):
                assert group_id not in self.delivered
                self.cancelled.add(group_id)
            case do.DeliverGroup(group_id=group_id, step=step, trainer_epoch=epoch, again=again):
                assert epoch == self.trainer_epoch and step == self.step_open
                assert again == (group_id in self.delivered), f"{group_id} again={again}"
                staleness = step - self.versions[self.members[group_id][0]]
                assert 0 <= staleness < self.window, f"{group_id} is trained {staleness} steps late (C3)"
                assert self.delivered.setdefault(group_id, step) == step
                self.received[step].append(group_id)
            case do.CloseStep(step=step, exhausted=exhausted):
                assert step == self.step_open
                assert exhausted or len(self.received[step]) == self.groups, f"step {step}: {self.received[step]}"
                self.ended = exhausted
                self.step_open, self.step_ready = None, step if self.received[step] else None
            case do.RetireVersion(version=version):
                self.retired.add(version)
            case do.EvictWorker(worker_id=name) | do.StopWorker(worker_id=name):
                worker = self.workers.pop(name, None)
                if worker is not None:  # else it is being killed just now
                    self.calls.append(on.WorkerLost(name, worker.epoch, "ended"))
            case do.ReleaseSnapshot(locator=locator):
                del self.snapshots[locator]  # exactly once
            case do.WorkerCommand(worker_id=name, epoch=epoch):
                if isinstance(command, do.LoadVersion):  # the shell looks the weights up when it sends this
                    assert command.version not in self.retired, f"load of the retired version {command.version}"
                worker = self.workers.get(name)
                if worker is not None and worker.epoch == epoch:
                    worker.inbox.append(command)

    def offer(self, count: int) -> on.PromptsOffered:
        """1 to ``count`` prompts; now and then a group larger than a worker. None left: the end."""
        size = self.group_size if self.random.random() < 0.9 else self.random.randrange(1, 10)
        number = self.random.randrange(1, count + 1)
        if self.prompts_left is not None:
            number = min(number, self.prompts_left)
            self.prompts_left -= number
        names = (f"p{self.random.getrandbits(60)}" for _ in range(number))
        prompts = tuple(on.OfferedPrompt(name, "task", 5, size, 60) for name in names)
        return on.PromptsOffered(prompts, exhausted=not prompts)

    def deliver_tokens(self, event: on.Progress) -> None:
        """The shell's part: only the owner's tokens enter the book, and none is missing before them."""
        for request_id, tokens in event.tokens.items():
            if self.machine.owns(event.worker_id, event.epoch, request_id):
                assert tokens >= self.book[request_id], f"{request_id} went back to {tokens}"
                assert event.version == self.versions[request_id], f"{request_id} sampled under {event.version} (C1)"
                self.book[request_id] = tokens
