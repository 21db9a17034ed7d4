"""Plans the faults and their order: the victims by moment, shuffled by a seed, in turns."""

import itertools
import random
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Final, Literal, get_args

Action = Literal["kill", "stop", "fill", "jump", "cut", "stall", "copy", "older", "second"]

ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
PHASES: Final = ("PLANNED", "RESERVED", "COPYING", "FROZEN", "COMMITTED")
COMMIT_MOMENTS: Final = ("taking", "committing", "publishing", "published", "loading")
TOOL_TIME: Final = "tool time"  # a session waits for its environment
LONGER_THAN_SILENCE: Final = "longer than a worker may be silent"
POOLED_TOOL_TIME: Final = "tool time in a pool"
TURN: Final = "turn"  # a session's environment has asked for one
CHAT_MOMENTS: Final = ("chat asking", "chat turn", "chat answered", "chat closing")
IDLE_PHASES: Final = tuple(f"{kind}:{phase}" for kind in ("idle-move", "idle-park") for phase in PHASES)
OF_SESSIONS: Final = (
    "environment",
    "environments",
    "front",
    TOOL_TIME,
    POOLED_TOOL_TIME,
    TURN,
    *CHAT_MOMENTS,
    *IDLE_PHASES,
)  # victims and moments


@dataclass(frozen=True, slots=True)
class Fault:
    """``victim``: source and target are the ends of a handoff, worker any that is at work; what is cut is the link to
    the host that has joined, one way; of a second service, what it shares with the first; after a comma, how.
    ``moment``: what has to be seen before it strikes: a phase of
    a handoff, as ``move:PHASE``, ``park:PHASE`` and ``resume:PHASE``, and of one in tool time, as ``idle-move:PHASE``
    and ``idle-park:PHASE``; what a trainer or an environment is at; or what the service does.
    """

    action: Action
    victim: str
    moment: str

    @property
    def name(self) -> str:
        return f"{self.action} {self.victim} at {self.moment}"

    @property
    def whose(self) -> str:
        """The victim alone."""
        return self.victim.partition(", ")[0]

    @property
    def how(self) -> str:
        """The duration or the effect of the fault; mostly empty."""
        return self.victim.partition(", ")[2]

    @property
    def is_kill(self) -> bool:
        return self.action == "kill"

    @property
    def kills(self) -> int:
        """The number of killed processes. STRANDED takes a killed source first, and who restarts is killed again."""
        return (1 + self.moment.endswith(("STRANDED", "restarting"))) * self.is_kill


def _kills() -> Iterator[Fault]:
    for phase, victim in itertools.product(PHASES, ("source", "target", "orchestrator")):
        yield Fault("kill", victim, f"move:{phase}")
    for victim in ("target", "orchestrator"):
        yield Fault("kill", victim, "move:STRANDED")
    for phase, victim in itertools.product(("RESERVED", "COMMITTED"), ("source", "pool", "orchestrator")):
        yield Fault("kill", victim, f"park:{phase}")
    for victim in ("target", "pool", "orchestrator"):
        yield Fault("kill", victim, "resume:RESERVED")
    for moment, victim in itertools.product(COMMIT_MOMENTS, ("trainer", "orchestrator", "worker")):
        yield Fault("kill", victim, moment)
    for victim in ("verifier", "keeper", "orchestrator", "worker"):
        yield Fault("kill", victim, "scoring")
    yield Fault("kill", "orchestrator", "admission")
    yield Fault("kill", "orchestrator", "restarting")
    yield Fault("kill", "orchestrator", "resume:COMMITTED")
    yield Fault("kill", "orchestrator", "submitting")
    for victim in ("orchestrator", "agent", "host worker"):
        yield Fault("kill", victim, "decoding")
    yield from _session_kills()


def _session_kills() -> Iterator[Fault]:
    for victim in ("environment", "environments", "orchestrator", "worker", "host worker", "agent"):
        yield Fault("kill", victim, TOOL_TIME)
    for victim in ("environment", "orchestrator", "pool"):
        yield Fault("kill", victim, POOLED_TOOL_TIME)
    for victim in ("environment", "orchestrator", "worker"):
        yield Fault("kill", victim, TURN)
    for moment in CHAT_MOMENTS:
        yield Fault("kill", "front", moment)
    for victim in ("orchestrator", "worker"):
        yield Fault("kill", victim, "chat turn")
    for phase, victim in itertools.product(("RESERVED", "COMMITTED"), ("source", "target", "orchestrator")):
        yield Fault("kill", victim, f"idle-move:{phase}")
    for victim in ("source", "pool", "orchestrator"):
        yield Fault("kill", victim, "idle-park:RESERVED")


def _cuts() -> Iterator[Fault]:
    moments = ("decoding", "publishing", "loading", "move:COPYING", "move:FROZEN", "move:COMMITTED")
    for moment, way in itertools.product(moments, ("from host", "to host")):
        yield Fault("cut", way, moment)
    for way in ("from host", "to host"):
        yield Fault("cut", f"{way}, until it is lost", "decoding")
        yield Fault("cut", f"{way}, and kill orchestrator", "decoding")


KILLS: Final = tuple(_kills())
RANK_KILLS: Final = tuple(Fault("kill", "rank", moment) for moment in ("decoding", "loading", "taking"))
OTHERS: Final = (
    Fault("stop", "worker", "decoding"),
    Fault("stop", "worker, until it is lost", "decoding"),
    Fault("stop", "source", "move:COPYING"),
    Fault("stop", "target", "move:RESERVED"),
    Fault("stop", "orchestrator", "decoding"),
    Fault("stop", "orchestrator", "publishing"),
    Fault("stop", f"orchestrator, {LONGER_THAN_SILENCE}", "decoding"),
    Fault("stop", "environment", TOOL_TIME),
    Fault("stop", "worker, until it is lost", TOOL_TIME),
    Fault("stop", "trainer", "taking"),
    Fault("stop", "trainer", "publishing"),
    Fault("stop", "verifier", "scoring"),
    Fault("stop", "keeper", "scoring"),
    Fault("stop", "pool", "decoding"),
    Fault("stop", "agent", "decoding"),
    Fault("fill", "state", "decoding"),
    Fault("fill", "state", "publishing"),
    Fault("fill", "state, and kill orchestrator", "decoding"),
    Fault("jump", "orchestrator, an hour on", "decoding"),
    Fault("jump", "orchestrator, a day back", "decoding"),
    *_cuts(),
    Fault("stall", "worker", "decoding"),
    Fault("stall", "source", "move:COPYING"),
)
RIVALS: Final = (
    Fault("copy", "state", "decoding"),
    Fault("older", "state", "decoding"),
    *(
        Fault("second", thing, "decoding")
        for thing in ("state", "record", "run folder", "port", "kept weights", "agent")
    ),
)
EACH_KILLS: Final = 5  # one of the others, and one of the rivals, come after so many kills


def drawn(seed: int, without: Set[str] = frozenset(), has_ranks: bool = False) -> Iterator[Fault]:
    """Faults without end, each kind as often as any other of its action. ``without``: actions, victims and moments that
    are left out; ``has_ranks``: whether workers have several."""
    chance = random.Random(f"chaos {seed}")
    kills = offered((*KILLS, *(RANK_KILLS if has_ranks else ())), without)
    others, rivals = offered(OTHERS, without), offered(RIVALS, without)
    of_kills, of_others, of_rivals = (_endless(kinds, chance) for kinds in (kills, others, rivals))
    while True:
        yield from itertools.islice(of_kills, EACH_KILLS)
        yield from itertools.islice(of_others, 1)
        yield from itertools.islice(of_rivals, 1)


def named(names: str) -> tuple[Fault, ...]:
    """The faults of these names, with semicolons between. Raises ValueError for one that there is not."""
    known = {each.name: each for each in (*KILLS, *RANK_KILLS, *OTHERS, *RIVALS)}
    unknown = [name for name in names.split(";") if name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no fault; there are {'; '.join(known)}")
    return tuple(known[name] for name in names.split(";"))


def offered(kinds: Sequence[Fault], without: Set[str]) -> list[Fault]:
    """Those of which neither the action, nor the victim, nor the moment is left out."""
    return [each for each in kinds if not without & {each.action, *each.victim.split(", "), each.moment}]


def _endless(kinds: list[Fault], chance: random.Random) -> Iterator[Fault]:
    """Nothing where there are none."""
    while kinds:
        chance.shuffle(kinds)
        yield from kinds
