"""What a worker says, checked before it is believed. What is wrong here is the worker's error, never the service's.

Every check raises InvalidValue; the worker's stream ends with it, the worker is replaced, its requests run again.
"""

import math
import re
from collections.abc import Sequence
from typing import Final

from dora.config import Config
from dora.errors import InvalidValue
from dora.kvtransfer.transport import NAMES
from dora.limits import COUNT_MOST, KV_TOKENS_MOST, TOKENS_MOST
from dora.orchestrator.book import Book, BookError
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.types import EngineCapability, PoolCapability, TokenDelta
from dora.weights.canary import LOGPROB_MOST

WORKER_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ERROR_KINDS: Final = ("", "refused", "not_movable", "unknown_request", "invalid", "weights")
_REASON_MOST: Final = 2000  # characters of why a KV transport failed
_TEXT_MOST: Final = 256  # characters of a host's name, a fingerprint, a dtype
KV_TOKEN_BYTES_MOST: Final = 1 << 40
_TOTAL_MOST: Final = 1 << 53  # of counters over a worker's life: beyond it a double is not exact


def checked_hello(hello: pb.WorkerHello, config: Config, vocab_size: int) -> EngineCapability:
    """What the worker's engine can hold. ``vocab_size``: the model's; 0 where its config does not say."""
    if not WORKER_ID.fullmatch(hello.worker_id):
        raise InvalidValue("worker_id", hello.worker_id, "1 to 64 letters, digits, '.', '_' or '-'")
    for name in ("host", "fingerprint", "dtype", "kv_address"):
        _check_text(name, getattr(hello, name))
    least_tokens = config.workers.context_tokens
    for name, least, most in (
        ("slots", 1, COUNT_MOST),
        ("kv_tokens", 1, KV_TOKENS_MOST),
        ("block_tokens", 1, COUNT_MOST),
        ("max_model_len_tokens", least_tokens, TOKENS_MOST),
        ("vocab_size", vocab_size or 2, vocab_size or COUNT_MOST),
        ("tensor_parallel", 1, COUNT_MOST),
        ("pipeline_parallel", 1, COUNT_MOST),
        ("kv_token_bytes", 0, KV_TOKEN_BYTES_MOST),
    ):
        if not least <= getattr(hello, name) <= most:
            raise InvalidValue(name, getattr(hello, name), f"{least} to {most}" if least < most else f"{most}")
    _check_transports(hello.kv_transports)
    if not hello.fingerprint:
        raise InvalidValue("fingerprint", "", "the hash of what workers must have alike")
    return convert.capability_from_wire(hello)


def checked_pool_hello(hello: pb.PoolHello) -> PoolCapability:
    """What the pool can hold."""
    if not WORKER_ID.fullmatch(hello.pool_id):
        raise InvalidValue("pool_id", hello.pool_id, "1 to 64 letters, digits, '.', '_' or '-'")
    for name in ("host", "kv_address"):
        _check_text(name, getattr(hello, name))
    _check_transports(hello.kv_transports)
    for name, least in (("memory_bytes", 1), ("spill_bytes", 0)):
        if not least <= getattr(hello, name) <= _TOTAL_MOST:
            raise InvalidValue(name, getattr(hello, name), f"{least} to {_TOTAL_MOST}")
    return PoolCapability(hello.memory_bytes, hello.spill_bytes)


def checked_pool_report(report: pb.PoolReport) -> None:
    """What a pool holds, and what it has dropped."""
    for name in ("memory_bytes", "spill_bytes", "pinned_bytes", "spilled"):
        if getattr(report, name) > _TOTAL_MOST:
            raise InvalidValue(name, getattr(report, name), f"at most {_TOTAL_MOST}")
    _check_text("reason", report.reason, _REASON_MOST)


def _check_text(name: str, text: str, most: int = _TEXT_MOST) -> None:
    if not text.isprintable() or len(text) > most:
        raise InvalidValue(name, text, f"printable, of at most {most} characters")


def _check_transports(names: Sequence[str]) -> None:
    if len(names) > len(NAMES) or not set(names) <= set(NAMES):
        raise InvalidValue("kv_transports", list(names)[:9], f"of {', '.join(NAMES)}")


def checked_deltas(report: pb.WorkerReport, kv_tokens: int, vocab_size: int) -> list[TokenDelta]:
    """The tokens of a report, each possible in itself; whether they continue the book is for the other check to say.

    ``kv_tokens``: what fits the worker's KV-cache, as it said itself.
    """
    for name, most in (
        ("kv_used_tokens", kv_tokens),
        ("generated_tokens", _TOTAL_MOST),
        ("reprefilled_tokens", _TOTAL_MOST),
    ):
        if getattr(report, name) > most:
            raise InvalidValue(name, getattr(report, name), f"at most {most}")
    for name in ("found_tokens", "kept_tokens", "damaged_chunks", "losses"):
        if getattr(report.kv_tier, name) > _TOTAL_MOST:
            raise InvalidValue(f"kv_tier.{name}", getattr(report.kv_tier, name), f"at most {_TOTAL_MOST}")
    deltas = [convert.delta_from_wire(message) for message in report.deltas]
    for delta in deltas:
        what = f"{delta.request_id[:80]}: "
        for token_id in delta.token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidValue(f"{what}token_ids", token_id, f"0 to {vocab_size - 1}, the vocabulary")
        for logprob in delta.logprobs:
            if not -math.inf < logprob <= LOGPROB_MOST:  # a comparison with NaN is false
                raise InvalidValue(f"{what}logprobs", logprob, "finite and not above 0")
    return deltas


def check_against_book(book: Book, deltas: list[TokenDelta]) -> None:
    """Raises BookError unless these tokens, of requests that the worker owns, can all join the book."""
    ends: dict[str, int] = {}  # response tokens after the deltas so far
    finished: set[str] = set()
    for delta in deltas:
        entry, end = book[delta.request_id], ends.get(delta.request_id)
        if delta.request_id in finished:
            raise BookError(f"{delta.request_id}: tokens", "more of them", "none, as its end was reported")
        if end is None:
            entry.check(delta)
        elif delta.first_token != end:
            raise BookError(f"{delta.request_id}: first token", delta.first_token, f"{end}, the next one")
        held = len(entry.tokens) if end is None else end
        ends[delta.request_id] = end = max(held, delta.first_token + len(delta.token_ids))
        if end > entry.sampling.max_tokens:
            raise BookError(f"{delta.request_id}: tokens", end, f"at most max_tokens, {entry.sampling.max_tokens}")
        if delta.stop and (delta.finish_reason != "stop" or delta.stop not in entry.sampling.stop):
            raise BookError(f"{delta.request_id}: stop", delta.stop[:80], "one of its stop strings, at its end")
        if delta.finish_reason is not None:
            if not end:
                raise BookError(f"{delta.request_id}: tokens", 0, "at least one where it has ended")
            finished.add(delta.request_id)


def checked_outcome(outcome: pb.WorkerOutcome) -> None:
    """What an outcome says beside its command's own fields."""
    if outcome.error_kind not in ERROR_KINDS:
        raise InvalidValue("error_kind", outcome.error_kind, f"one of {', '.join(filter(None, ERROR_KINDS))}")
    if not outcome.canary_difference >= 0.0:  # a comparison with NaN is false
        raise InvalidValue("canary_difference", outcome.canary_difference, "0 or above")
    if outcome.snapshot_bytes > _TOTAL_MOST:
        raise InvalidValue("snapshot_bytes", outcome.snapshot_bytes, f"at most {_TOTAL_MOST}")
    if outcome.kv_transport and outcome.kv_transport not in NAMES:
        raise InvalidValue("kv_transport", outcome.kv_transport, f"one of {', '.join(NAMES)}")
    if len(outcome.kv_fallbacks) > len(NAMES) or any(len(each) > _REASON_MOST for each in outcome.kv_fallbacks):
        allowed = f"at most {len(NAMES)} reasons of at most {_REASON_MOST} characters"
        raise InvalidValue("kv_fallbacks", len(outcome.kv_fallbacks), allowed)
