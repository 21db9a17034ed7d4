"""Checks workers' messages. An error here is the worker's, not the service's.

Every check raises InvalidValue; that ends the worker's stream, the worker is replaced, and its requests run elsewhere.
"""

import math
import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from dora.config import Config
from dora.data.engine_times import BY_NAME, ENDS
from dora.data.input_digest import DIGEST_BYTES
from dora.data.limits import COUNT_MAX, KV_TOKENS_MAX, TOKENS_MAX
from dora.data.token_spans import TokenColumns
from dora.data.types import EngineCapability, PoolCapability
from dora.errors import MISSING, InvalidValue
from dora.kvtransfer.transports.registry import TRANSPORTS
from dora.orchestrator.rollout.responses.span_checks import LOGPROB_BYTES
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.columns import columns_from_wire
from dora.weights.canary import LOGPROB_MAX

WORKER_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ERROR_KINDS: Final = ("", "refused", "not_movable", "unknown_request", "invalid", "weights", "missing")
_REASON_MAX: Final = 2000  # characters of a KV transport's error
_TEXT_MAX: Final = 256  # characters of a host's name, a fingerprint, a dtype
HELD_MAX: Final = 1 << 17  # requests of one worker or pool
KV_TOKEN_BYTES_MAX: Final = 1 << 40
STATE_BYTES_MAX: Final = 1 << 40
_TOTAL_MAX: Final = 1 << 53  # of a worker's counters: a larger integer is not exact as a double


def checked_hello(hello: pb.WorkerHello, config: Config, vocab_size: int) -> EngineCapability:
    """Returns the capacity of the worker's engine. ``vocab_size`` is the model's, or 0 if its config has none."""
    if not WORKER_ID.fullmatch(hello.worker_id):
        raise InvalidValue("worker_id", hello.worker_id, "1 to 64 letters, digits, '.', '_' or '-'")
    for name in ("host", "fingerprint", "dtype", "kv_address"):
        _check_text(name, getattr(hello, name))
    least_tokens = config.workers.context_tokens
    for name, least, most in (
        ("slots", 1, COUNT_MAX),
        ("kv_tokens", 1, KV_TOKENS_MAX),
        ("block_tokens", 1, COUNT_MAX),
        ("max_model_len_tokens", least_tokens, TOKENS_MAX),
        ("vocab_size", vocab_size or 2, vocab_size or COUNT_MAX),
        ("tensor_parallel", 1, COUNT_MAX),
        ("pipeline_parallel", 1, COUNT_MAX),
        ("kv_token_bytes", 0, KV_TOKEN_BYTES_MAX),
        ("state_bytes", 0, STATE_BYTES_MAX),
    ):
        if not least <= getattr(hello, name) <= most:
            raise InvalidValue(name, getattr(hello, name), f"{least} to {most}" if least < most else f"{most}")
    _check_transports(hello.kv_transports)
    _check_held(hello.held, hello.max_model_len_tokens)
    if hello.held and not hello.HasField("hosts"):
        raise InvalidValue("hosts", MISSING, "given by a worker that holds requests")
    if not hello.fingerprint:
        raise InvalidValue("fingerprint", "", "the hash of all that workers must have in common")
    return convert.capability_from_wire(hello)


def checked_pool_hello(hello: pb.PoolHello) -> PoolCapability:
    if not WORKER_ID.fullmatch(hello.pool_id):
        raise InvalidValue("pool_id", hello.pool_id, "1 to 64 letters, digits, '.', '_' or '-'")
    for name in ("host", "kv_address"):
        _check_text(name, getattr(hello, name))
    _check_transports(hello.kv_transports)
    _check_held(hello.held, TOKENS_MAX)
    for name, least in (("memory_bytes", 1), ("spill_bytes", 0)):
        if not least <= getattr(hello, name) <= _TOTAL_MAX:
            raise InvalidValue(name, getattr(hello, name), f"{least} to {_TOTAL_MAX}")
    return PoolCapability(hello.memory_bytes, hello.spill_bytes)


def _check_held(held: Sequence[pb.HeldRequest], tokens_most: int) -> None:
    """Checks the requests that a worker or pool of an earlier incarnation holds. Their ids may be unknown."""
    if len(held) > HELD_MAX:
        raise InvalidValue("held", f"{len(held)} requests", f"at most {HELD_MAX}")
    if len({each.request_id for each in held}) < len(held):
        raise InvalidValue("held", "a request twice", "each request once")
    for each in held:
        _check_text("held.request_id", each.request_id)
        if not each.first_token <= each.tokens <= tokens_most:
            allowed = f"first_token at most tokens, and these at most {tokens_most}"
            raise InvalidValue(f"held.{each.request_id}", [each.first_token, each.tokens], allowed)
        if len(each.given_digest) not in (0, DIGEST_BYTES):
            digest = f"empty, or of {DIGEST_BYTES} bytes"
            raise InvalidValue(f"held.{each.request_id}: given_digest bytes", len(each.given_digest), digest)


def checked_pool_report(report: pb.PoolReport) -> None:
    for name in ("memory_bytes", "spill_bytes", "pinned_bytes", "spilled"):
        if getattr(report, name) > _TOTAL_MAX:
            raise InvalidValue(name, getattr(report, name), f"at most {_TOTAL_MAX}")
    _check_text("reason", report.reason, _REASON_MAX)


def _check_text(name: str, text: str, most: int = _TEXT_MAX) -> None:
    if not text.isprintable() or len(text) > most:
        raise InvalidValue(name, text, f"printable, of at most {most} characters")


def _check_transports(names: Sequence[str]) -> None:
    if len(names) > len(TRANSPORTS) or not set(names) <= set(TRANSPORTS):
        raise InvalidValue("kv_transports", list(names)[:9], f"of {', '.join(TRANSPORTS)}")


def _check_times(times: pb.EngineTimes) -> None:
    """Checks the histograms of an engine, whose names and sizes bound what is kept of them."""
    names = [each.name for each in times.histograms]
    if len(set(names)) != len(names) or not set(names) <= set(BY_NAME):
        raise InvalidValue("times.histograms", names[:9], f"{', '.join(BY_NAME)}, each once")
    for each in times.histograms:
        buckets = len(BY_NAME[each.name].bounds) + 1
        if len(each.buckets) != buckets or max(each.buckets) > _TOTAL_MAX:
            raise InvalidValue(each.name, f"{len(each.buckets)} counts", f"{buckets}, of at most {_TOTAL_MAX}")
        if not 0 <= each.sum < math.inf:
            raise InvalidValue(f"{each.name}: sum", each.sum, "finite, and at least 0")
    if not set(times.ended) <= set(ENDS):
        raise InvalidValue("times.ended", list(times.ended)[:9], ", ".join(ENDS))
    for count in (*times.ended.values(), times.prompt_tokens):
        if count > _TOTAL_MAX:
            raise InvalidValue("times", count, f"at most {_TOTAL_MAX}")


def checked_tokens(report: pb.WorkerReport, kv_tokens: int, vocab_size: int, rows_most: int) -> TokenColumns:
    """Checks the tokens of a report by themselves. ``ResponseBuffer.accept`` checks that they continue their responses.

    ``kv_tokens`` is the size of the worker's KV-cache, as it reported. ``rows_most`` is an upper bound of rows.
    """
    for name, most in (
        ("kv_used_tokens", kv_tokens),
        ("generated_tokens", _TOTAL_MAX),
        ("reprefilled_tokens", _TOTAL_MAX),
    ):
        if getattr(report, name) > most:
            raise InvalidValue(name, getattr(report, name), f"at most {most}")
    for name in ("found_tokens", "kept_tokens", "damaged_chunks", "losses") if report.HasField("kv_tier") else ():
        if getattr(report.kv_tier, name) > _TOTAL_MAX:
            raise InvalidValue(f"kv_tier.{name}", getattr(report.kv_tier, name), f"at most {_TOTAL_MAX}")
    if report.HasField("times"):
        _check_times(report.times)
    columns = columns_from_wire(report.tokens)
    token_ids, logprobs = columns.token_ids, columns.logprobs
    if not len(columns):
        return columns
    if columns.rows.max() >= rows_most:
        raise InvalidValue("rows", int(columns.rows.max()), "the row of a request")
    if len(token_ids) and token_ids.view("<u4").max() >= vocab_size:  # negative numbers are large as unsigned ones
        wrong = token_ids.view("<u4") >= vocab_size
        raise InvalidValue("token_ids", token_ids[wrong][0].item(), f"0 to {vocab_size - 1}, the vocabulary")
    if len(logprobs) and not (logprobs.min() > -np.inf and logprobs.max() <= LOGPROB_MAX):  # false with NaN
        wrong = ~((logprobs > -np.inf) & (logprobs <= LOGPROB_MAX))
        raise InvalidValue("logprobs", logprobs[wrong][0].item(), "finite and not above 0")
    for raw in columns.prompt_logprobs.values():
        if len(raw) % LOGPROB_BYTES:
            raise InvalidValue("prompt_logprobs: bytes", len(raw), f"a multiple of {LOGPROB_BYTES}")
        values = np.frombuffer(raw, "<f4")  # -inf: of a token that the model cannot sample
        if not (values <= LOGPROB_MAX).all():  # a comparison with NaN is false
            raise InvalidValue("prompt_logprobs", values[~(values <= LOGPROB_MAX)][0].item(), "not above 0")
    return columns


def checked_outcome(outcome: pb.WorkerOutcome) -> None:
    if outcome.error_kind not in ERROR_KINDS:
        raise InvalidValue("error_kind", outcome.error_kind, f"one of {', '.join(filter(None, ERROR_KINDS))}")
    if not outcome.canary_difference >= 0.0:  # a comparison with NaN is false
        raise InvalidValue("canary_difference", outcome.canary_difference, "0 or above")
    if outcome.snapshot_bytes > _TOTAL_MAX:
        raise InvalidValue("snapshot_bytes", outcome.snapshot_bytes, f"at most {_TOTAL_MAX}")
    if outcome.kv_transport and outcome.kv_transport not in TRANSPORTS:
        raise InvalidValue("kv_transport", outcome.kv_transport, f"one of {', '.join(TRANSPORTS)}")
    if len(outcome.kv_fallbacks) > len(TRANSPORTS) or any(len(each) > _REASON_MAX for each in outcome.kv_fallbacks):
        allowed = f"at most {len(TRANSPORTS)} reasons of at most {_REASON_MAX} characters"
        raise InvalidValue("kv_fallbacks", len(outcome.kv_fallbacks), allowed)
