"""What one engine step costs: the model behind routing decisions, plans and the simulator.

StaleFlow eq. 11-12 (paper 000, appendix B): a decode step of ``n`` running requests with ``kv`` cached tokens takes

    k1 * kv + max(k2, k3 * n) + k4

``k1`` reads a token's KV, ``k2`` reads the weights, ``k3`` computes one token, ``k4`` is everything else. The paper's
text calls k1 "per byte"; its value only makes sense per token. A mixture of experts reads more of its weights and
suffers more from uneven experts as the batch changes: ``expert_fraction`` and ``imbalance`` bend k2 and k3 (both
neutral for a dense model).
"""

from dataclasses import dataclass
from typing import TypeVar

from dora.orchestrator.core.table import Column

Tokens = TypeVar("Tokens", float, Column)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients of one engine (one DP group)."""

    kv_token_s: float  # k1: seconds a step for each cached token
    weights_s: float  # k2: seconds a step to read the (dense) weights
    request_s: float  # k3: seconds a step for each running request
    step_s: float  # k4: seconds a step for everything else
    prefill_token_s: float = 0.0  # seconds for each token whose KV is computed in one go
    expert_fraction: float = 1.0  # share of the weights that one token reads; 1: dense
    imbalance: float = 0.0  # k3 grows by this share when one request runs, and by its 1/sqrt(n) when n run

    def matmul_s(self, running: int) -> float:
        """The part of a step that depends on the number of running requests alone."""
        if not running:
            return 0.0
        touched = 1.0 - (1.0 - self.expert_fraction) ** running
        compute_s = self.request_s * running * (1.0 + self.imbalance / running**0.5)
        return max(self.weights_s * touched, compute_s) + self.step_s

    def decode_step_s(self, running: int, kv_tokens: float) -> float:
        """Seconds of one decode step (eq. 11)."""
        return self.kv_token_s * kv_tokens + self.matmul_s(running)

    def tokens_per_s(self, running: int, kv_tokens: float) -> float:
        """Generation throughput of one engine (eq. 12)."""
        return running / self.decode_step_s(running, kv_tokens) if running else 0.0


def context_work(tokens: Tokens, prompt_tokens: int) -> Tokens:
    """Context-tokens, summed over the steps of a response of so many tokens: what it costs of KV that is scarce."""
    return tokens * (tokens / 2 + prompt_tokens)
