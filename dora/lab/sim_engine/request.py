"""One response inside a simulated engine, where it stands there, and what an engine did."""

from dataclasses import dataclass
from enum import Enum, auto


class EnginePhase(Enum):
    WAITING = auto()  # for a slot or for KV
    RUNNING = auto()
    AWAY = auto()  # its environment answers, or its next turn has not been asked; the KV stays
    FROZEN = auto()  # a handoff copies it


WAITING, RUNNING, AWAY, FROZEN = EnginePhase  # by name: Python 3.11 takes long to look up an enumeration's member


@dataclass(frozen=True, slots=True)
class EngineTurn:
    """One turn: ``tokens`` are sampled, then the environment takes ``environment_s`` and adds ``answer_tokens``."""

    tokens: int
    environment_s: float
    answer_tokens: int


@dataclass(slots=True, eq=False)
class SimRequest:
    """One response inside an engine."""

    request_id: str
    group_id: str
    version: int
    prompt: int  # tokens of the prompt and, unless ``keeps``, of the environment's answers so far
    tokens: int  # response tokens; while it runs: at ``since_step``
    left: int  # response tokens to the end of this turn, counted like ``tokens``
    length: int  # response tokens at the end
    turns: tuple[EngineTurn, ...] = ()
    turn: int = 0
    cached: bool = False  # its KV exists, on the engine or in host memory: no prefill before it runs
    resident: bool = False  # its KV lies on the engine
    unread: bool = False  # and no step reads it: since its environment was called, until it runs again
    forked: bool = False  # a session: its present turn has left the branch of the one before
    cut_tokens: int = 0  # tokens that the KV of that branch loses to serve this turn; 0: it does not serve it
    keeps: bool = False  # a session: it stays at the end of each turn, and its tokens include the answers
    phase: EnginePhase = WAITING
    since_step: float = 0.0
    start: int = 0  # number of its present run on its engine
    order: int = 0  # of arrival; the youngest is preempted first

    @property
    def context(self) -> int:
        return self.prompt + self.tokens

    @property
    def is_kept(self) -> bool:
        """Whether it is a session whose turn has ended."""
        return self.keeps and not self.left


@dataclass(slots=True)
class Totals:
    """An engine's counts since its start."""

    generated_tokens: int = 0
    context_token_steps: float = 0.0  # sum over steps of cached tokens: the C of the bound
    steps: float = 0.0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    reprefill_s: float = 0.0  # part of prefill_s: KV computed a second time
    preemptions: int = 0
