"""The cost model of an engine step, used by routing decisions, plans and the simulator.

StaleFlow, eq. 11-12 (appendix B): a decode step of ``n`` running requests with ``kv`` cached tokens takes

    k1 * kv + max(k2, k3 * n) + k4

``k1`` reads a token's KV, ``k2`` reads the weights, ``k3`` computes one token, ``k4`` is everything else. The paper's
text calls k1 "per byte"; its value only makes sense per token. A mixture of experts changes two terms, which the paper
does not model. A step reads the shared weights and the experts that any of its tokens chose. It also waits for the
fullest of its expert-parallel ranks:

    k2 * read_share(n)      read_share = 1 - (1 - shared_fraction) * (1 - expert_fraction) ** n
    k3 * n * (1 + imbalance / sqrt(n))

The first term assumes that tokens choose their experts independently and evenly. With ``n`` such choices the fullest
rank's share differs from the mean by sqrt(n), hence the second term. A dense model has an ``expert_fraction`` of 1 and
an ``imbalance`` of 0.

Layers that keep a state instead of KV read and write it once per request, however long its context is. They add a term
of ``state_s * n``, and a copy of a request takes ``copy_state_s`` besides the time of its KV.

An engine that drafts ``d`` tokens for each request computes ``n * (1 + d)`` tokens in a step and reads the KV once. If
each drafted token is accepted with probability ``p`` while all before it are, a request gains ``1 + p + ... + p**d``
tokens a step. The engine takes the ``d`` that is best for its batch (``worker/drafting/pace.py``), none in a full one,
and all times here are those in which each request gains one token.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, TypeVar

from dora.config import CostConfig
from dora.core.table import Column
from dora.data.limits import DRAFT_TOKENS_MAX

Number = TypeVar("Number", float, Column)
_OF_A_STEP: Final = ("kv_token_s", "weights_s", "request_s", "step_s", "prefill_token_s", "state_s", "draft_verify_s")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients of one engine (one worker)."""

    kv_token_s: float  # k1: seconds of a step per cached token
    weights_s: float  # k2: seconds of a step to read the (dense) weights
    request_s: float  # k3: seconds of a step per running request
    step_s: float  # k4: seconds of a step for everything else
    prefill_token_s: float = 0.0  # seconds per token whose KV is computed in one prefill
    copy_token_s: float = 1e-5  # seconds per token whose KV is copied into or out of a pool: 25 GB/s, 256 KiB each
    state_s: float = 0.0  # seconds of a step per running request, to read and write its state
    copy_state_s: float = 0.0  # seconds to copy a request's state into or out of a pool
    expert_fraction: float = 1.0  # share of the unshared weights that one token reads: its experts; 1: dense
    imbalance: float = 0.0  # k3 grows by this share with one running request, and by its 1/sqrt(n) with n
    shared_fraction: float = 0.0  # share of all weights that every token reads: attention, embeddings, shared experts
    draft_acceptance: float = 0.0  # probability that a drafted token is accepted; 0: the engine drafts none
    draft_verify_s: float = 0.0  # seconds of a step to verify drafts at all

    @classmethod
    def of(cls, config: CostConfig) -> "CostModel":
        return cls(**config.model_dump())

    @property
    def dense(self) -> bool:
        return self.expert_fraction == 1.0 and not self.imbalance

    @property
    def state_tokens(self) -> int:
        """The tokens whose KV takes as long to copy as a request's state, and as much room in a pool."""
        return round(self.copy_state_s / self.copy_token_s) if self.copy_token_s else 0

    def scaled(self, scale: float) -> "CostModel":
        """The cost of an engine whose steps and prefills take ``scale`` times as long. Copies take as long."""
        return self if scale == 1.0 else _scaled(self, scale)

    def matmul_s(self, running: int) -> float:
        """The part of a step that depends only on the number of running requests."""
        if not running:
            return 0.0
        return _drafting(self, running)[0] if self.draft_acceptance else self.computed_s(running)

    def kv_s(self, running: int) -> float:
        """The part of a step for each cached token."""
        return self.kv_token_s / _drafting(self, running)[1] if self.draft_acceptance and running else self.kv_token_s

    def copy_s(self, kv_tokens: float, requests: int = 1) -> float:
        """Seconds to copy the KV of so many tokens, and the states of so many requests, into or out of a pool."""
        return self.copy_token_s * kv_tokens + self.copy_state_s * requests

    def computed_s(self, tokens: int) -> float:
        """Seconds of a step that computes so many tokens, without their KV and whatever they yield.

        One of each request if they have states: no engine drafts for these.
        """
        read_s = self.weights_s * read_share(self.expert_fraction, self.shared_fraction, tokens)
        compute_s = self.request_s * tokens * (1.0 + self.imbalance / tokens**0.5)
        return max(read_s, compute_s) + self.state_s * tokens + self.step_s

    def decode_step_s(self, running: int, kv_tokens: float) -> float:
        """Seconds of one decode step (eq. 11), in which each request gains a token."""
        return self.kv_s(running) * kv_tokens + self.matmul_s(running)

    def kv_tokens_at(self, running: int, step_s: Number) -> Number:
        """KV with which a decode step takes ``step_s``: the inverse of eq. 11.

        It is negative below the time of a step without KV. Requires that KV costs time (``kv_token_s``).
        """
        return (step_s - self.matmul_s(running)) / self.kv_s(running)

    def tokens_per_s(self, running: int, kv_tokens: float) -> float:
        """Generation throughput of one engine (eq. 12)."""
        return running / self.decode_step_s(running, kv_tokens) if running else 0.0


@lru_cache(256)
def _scaled(cost: CostModel, scale: float) -> CostModel:
    return replace(cost, **{name: scale * getattr(cost, name) for name in _OF_A_STEP})


@lru_cache(1 << 16)
def _drafting(cost: CostModel, running: int) -> tuple[float, float]:
    """Returns the seconds of a step without KV in which each request gains a token, and the tokens that a request gains
    in one step of the engine, with the best draft for this batch.
    """
    best, tokens = (cost.computed_s(running), 1.0), 1.0
    for drafted in range(1, DRAFT_TOKENS_MAX + 1):
        tokens += cost.draft_acceptance**drafted
        step_s = (cost.computed_s(running * (1 + drafted)) + cost.draft_verify_s) / tokens
        if step_s < best[0]:
            best = step_s, tokens
    return best


def read_share(expert_fraction: float, shared_fraction: float, running: Number) -> Number:
    """Share of all weights that a step of ``running`` requests reads, 0 to 1. The module docstring has the formula."""
    return 1.0 - (1.0 - shared_fraction) * (1.0 - expert_fraction) ** running


def context_work(tokens: Number, prompt_tokens: int) -> Number:
    """Context-tokens, summed over the steps of a response of ``tokens`` tokens: its use of scarce KV."""
    return tokens * (tokens / 2 + prompt_tokens)
