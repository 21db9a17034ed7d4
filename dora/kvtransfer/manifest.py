"""The manifests of a snapshot's head: what they say of a request and its layout."""

from collections.abc import Mapping
from typing import Any, Final

import msgpack
import numpy as np

from dora.data.sampling import DOMAINS, LISTS
from dora.data.types import RequestSpec, SamplingParams
from dora.errors import SnapshotRefused
from dora.kvtransfer.snapshot import KvLayout

# Forms. A type: exactly that type, but an integer may stand for a number. A map: these keys and no others. [form]: a
# list of any length. (form, ...): a list of as many values.
LAYOUT: Final[Mapping[str, Any]] = {
    "fingerprint": str,
    "backend": str,
    "dtype": str,
    "block_tokens": int,
    "layers": [(str, int)],
    "shards": int,
    "windows": [int],
    "interiors": [(int, [(int, int)])],
}
SAMPLING: Final[Mapping[str, Any]] = {
    **{name: domain.kind for name, domain in DOMAINS.items()},
    **{name: [listing.kind] for name, listing in LISTS.items()},
}
_OUTPUTS: Final = {"output_token_ids": bytes, "logprobs": bytes, "given": bytes, "kept": bool}
OPENING: Final[Mapping[str, Any]] = {
    "layout": LAYOUT,
    "request_id": str,
    "version": int,
    "prompt_token_ids": bytes,
    "sampling": SAMPLING,
    "prefix": int,
    "keeps": bool,
    **_OUTPUTS,
}
CLOSING: Final[Mapping[str, Any]] = {
    "opening": bytes,
    "kv_tokens": int,
    "rng_draws": int,
    "state_tokens": int,
    "rounds": [int],
    "sampling": SAMPLING,
    **_OUTPUTS,
}


def unpacked(raw: bytes | memoryview, form: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest of this form. Raises SnapshotRefused with the first field that has another."""
    try:
        manifest = msgpack.unpackb(raw)
    except (TypeError, ValueError) as error:
        raise SnapshotRefused(f"head: {error!r}", "head") from error
    _check(manifest, form, "head")
    return dict(manifest)


def _check(value: Any, form: Any, field: str) -> None:
    if isinstance(form, Mapping):
        _require(isinstance(value, dict), field, value)
        for name in (*form, *(name for name in value if name not in form)):
            _require(name in form and name in value, f"{field}.{name}", value.get(name))
            _check(value[name], form[name], f"{field}.{name}")
    elif isinstance(form, list | tuple):
        _require(isinstance(value, list) and (isinstance(form, list) or len(value) == len(form)), field, value)
        for each, expected in zip(value, form * len(value) if isinstance(form, list) else form, strict=True):
            _check(each, expected, field)
    else:
        _require(type(value) is form or (form is float and type(value) is int), field, value)


def _require(is_right: bool, field: str, value: Any) -> None:
    if not is_right:
        raise SnapshotRefused(
            f"{field} = {value!r:.200}: it is missing, unknown, of another type or out of range", field, value
        )


def outputs_of(request: RequestSpec, first: int) -> dict[str, bytes]:
    """Output tokens from index ``first``, and their logprobs."""
    return {
        "output_token_ids": np.asarray(request.output_token_ids[first:], "<i4").tobytes(),
        "logprobs": np.asarray(request.logprobs[first:], "<f8").tobytes(),
    }


def turns_of(request: RequestSpec) -> dict[str, Any]:
    return {"given": np.asarray(request.inputs, "<i4").tobytes(), "kept": request.kept}


def read_turns(manifest: Mapping[str, Any]) -> dict[str, Any]:
    inputs = _array(manifest, "given", "<i4")
    _require(len(inputs) % 2 == 0, "head.given", inputs)
    return {"inputs": tuple(zip(inputs[::2], inputs[1::2], strict=True)), "kept": manifest["kept"]}


def read_sampling(manifest: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{**manifest["sampling"], **{name: tuple(manifest["sampling"][name]) for name in LISTS}})


def read_outputs(manifest: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return _array(manifest, "output_token_ids", "<i4"), _array(manifest, "logprobs", "<f8")


def _array(manifest: Mapping[str, Any], name: str, dtype: str) -> tuple[Any, ...]:
    try:
        return tuple(np.frombuffer(manifest[name], dtype).tolist())
    except ValueError as error:
        raise SnapshotRefused(f"head.{name}: {error}", f"head.{name}", len(manifest[name])) from error


def opened(manifest: dict[str, Any]) -> tuple[KvLayout, RequestSpec, int]:
    layout_fields = dict(manifest["layout"])
    layout_fields["layers"] = tuple((name, block_bytes) for name, block_bytes in layout_fields["layers"])
    layout_fields["windows"] = tuple(layout_fields["windows"])
    layout_fields["interiors"] = tuple(
        (times, tuple((outer, inner) for outer, inner in strips)) for times, strips in layout_fields["interiors"]
    )
    layout = KvLayout(**layout_fields)
    _require(
        len(layout.windows) in (0, len(layout.layers)) and all(size != 1 for size in layout.windows),
        "head.layout.windows",
        layout.windows,
    )
    _require(layout.block_tokens >= 1, "head.layout.block_tokens", layout.block_tokens)
    _require(min((size for _, size in layout.layers), default=0) >= 1, "head.layout.layers", layout.layers)
    _require(manifest["prefix"] >= 0, "head.prefix", manifest["prefix"])
    output_token_ids, logprobs = read_outputs(manifest)
    request = RequestSpec(
        request_id=manifest["request_id"],
        version=manifest["version"],
        prompt_token_ids=_array(manifest, "prompt_token_ids", "<i4"),
        sampling=read_sampling(manifest),
        output_token_ids=output_token_ids,
        logprobs=logprobs,
        keeps=manifest["keeps"],
        **read_turns(manifest),
    )
    return layout, request, manifest["prefix"]
