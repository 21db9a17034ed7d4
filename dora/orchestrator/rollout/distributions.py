"""The histograms of a service, each declared once: its metric's name, meaning and bounds."""

from typing import Final

from dora.core.handoff.table import HandoffKind
from dora.metrics.distribution import BRIEF_BOUNDS_S, LATENCY_BOUNDS_S, LONG_BOUNDS_S, Distribution

BYTES_BOUNDS: Final = tuple(float(4**power) for power in range(8, 18))  # 64 KiB to 16 GiB
TOKENS_BOUNDS: Final = tuple(float(2**power) for power in range(4, 21))  # 16 to 1 Mi
STALENESS_BOUNDS: Final = (*map(float, range(9)), 12.0, 16.0, 32.0)
REWARD_BOUNDS: Final = (-10.0, -5.0, -2.0, -1.0, -0.5, *(tenth / 10 for tenth in range(11)), 2.0, 5.0, 10.0)
KINDS: Final = tuple(kind.name.lower() for kind in HandoffKind)  # of handoffs


BLACKOUT: Final = Distribution(
    "dora_blackout_seconds", "Time without a token of a request that moved to another worker.", LATENCY_BOUNDS_S
)
PARKED: Final = Distribution(
    "dora_parked_seconds", "Time without a token of a request that was parked in a pool.", LATENCY_BOUNDS_S
)
COPY: Final = Distribution(
    "dora_copy_seconds",
    "Time from the order to copy a request's KV until its target has all of it, by kind of handoff.",
    LONG_BOUNDS_S,
    "kind",
    KINDS,
)
COPY_BYTES: Final = Distribution("dora_copy_bytes", "KV of one copied request.", BYTES_BOUNDS, "kind", KINDS)
FIRST_TOKEN: Final = Distribution(
    "dora_first_token_seconds", "Time from a group's admission to a response's first token.", LONG_BOUNDS_S
)
TOKEN: Final = Distribution(
    "dora_token_seconds",
    "Time between two tokens of a request: one observation a report, the mean of the worker's requests.",
    BRIEF_BOUNDS_S,
)
TOOL: Final = Distribution(
    "dora_tool_seconds",
    "Time from the end of a turn until its environment asks the next or ends the session.",
    LONG_BOUNDS_S,
)
RESPONSE: Final = Distribution("dora_response_tokens", "Length of a response that a step trained on.", TOKENS_BOUNDS)
LOAD: Final = Distribution("dora_load_seconds", "Time of a worker's load of a version.", LONG_BOUNDS_S)
PUBLISH: Final = Distribution(
    "dora_publish_seconds", "Time of a commit in the service: check, store, record, durable.", LONG_BOUNDS_S
)
RELAY: Final = Distribution("dora_relay_seconds", "Time in which a host fetched a version.", LONG_BOUNDS_S)
STEP: Final = Distribution("dora_step_seconds", "Time between two commits.", LONG_BOUNDS_S)
WAIT: Final = Distribution("dora_trainer_wait_seconds", "The trainer's wait for groups in a step.", LONG_BOUNDS_S)
STALENESS: Final = Distribution(
    "dora_staleness_steps", "Staleness of a trained response: step less version.", STALENESS_BOUNDS
)
REWARD: Final = Distribution("dora_reward", "Valid rewards of trained responses.", REWARD_BOUNDS)
SCORE: Final = Distribution("dora_score_seconds", "Time until the verdict on a response.", LONG_BOUNDS_S)
SYNC: Final = Distribution("dora_journal_sync_seconds", "Time of a write and fsync of the log.", BRIEF_BOUNDS_S)
LATE: Final = Distribution("dora_loop_late_seconds", "Lateness of the event loop's clock ticks.", BRIEF_BOUNDS_S)

DISTRIBUTIONS: Final = (
    FIRST_TOKEN,
    TOKEN,
    TOOL,
    BLACKOUT,
    PARKED,
    COPY,
    COPY_BYTES,
    LOAD,
    PUBLISH,
    RELAY,
    STEP,
    WAIT,
    STALENESS,
    REWARD,
    RESPONSE,
    SCORE,
    SYNC,
    LATE,
)
