"""The manifests of a snapshot's head: what they say of a request and its layout."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np

from dora.data.types import RequestSpec, SamplingParams
from dora.kvtransfer.snapshot import KvLayout

LISTS: Final = ("layers", "windows", "interiors", "stop", "stop_token_ids")


def outputs_of(request: RequestSpec, first: int) -> dict[str, bytes]:
    """Output tokens from index ``first``, and their logprobs."""
    return {
        "output_token_ids": np.asarray(request.output_token_ids[first:], "<i4").tobytes(),
        "logprobs": np.asarray(request.logprobs[first:], "<f8").tobytes(),
    }


def turns_of(request: RequestSpec) -> dict[str, Any]:
    return {"given": np.asarray(request.given, "<i4").tobytes(), "kept": request.kept}


def read_turns(manifest: Mapping[str, Any]) -> dict[str, Any]:
    runs = np.frombuffer(manifest["given"], "<i4").reshape(-1, 2).tolist()
    return {"given": tuple((first, end) for first, end in runs), "kept": _flag(manifest, "kept")}


def _flag(manifest: Mapping[str, Any], name: str) -> bool:
    value = manifest[name]
    if not isinstance(value, bool):
        raise TypeError(f"{name} = {value!r}")
    return value


def integer(manifest: Mapping[str, Any], name: str) -> int:
    value = manifest[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} = {value!r}")
    return value


def read_outputs(manifest: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    token_ids = np.frombuffer(manifest["output_token_ids"], "<i4").tolist()
    return tuple(token_ids), tuple(np.frombuffer(manifest["logprobs"], "<f8").tolist())


def opened(manifest: dict[str, Any]) -> tuple[KvLayout, RequestSpec, int]:
    layout_fields = _fields_of(manifest, "layout", KvLayout)
    layout_fields["layers"] = tuple((str(name), int(block_bytes)) for name, block_bytes in layout_fields["layers"])
    layout_fields["shards"] = int(layout_fields["shards"])
    layout_fields["windows"] = tuple(int(window) for window in layout_fields["windows"])
    layout_fields["interiors"] = tuple(
        (int(times), tuple((int(outer), int(inner)) for outer, inner in strips))
        for times, strips in layout_fields["interiors"]
    )
    layout = KvLayout(**layout_fields)
    if len(layout.windows) not in (0, len(layout.layers)) or any(size < 0 or size == 1 for size in layout.windows):
        raise ValueError(f"windows = {layout.windows[:8]} of {len(layout.layers)} layers")
    if layout.block_tokens < 1 or min((size for _, size in layout.layers), default=0) < 1:
        raise ValueError(f"block_tokens = {layout.block_tokens}, layers = {layout.layers[:8]}")
    sampling_fields = _fields_of(manifest, "sampling", SamplingParams)
    for name in ("stop", "stop_token_ids"):
        sampling_fields[name] = tuple(sampling_fields[name])
    integer(sampling_fields, "max_tokens")  # the closing's takes its place
    output_token_ids, logprobs = read_outputs(manifest)
    request = RequestSpec(
        request_id=str(manifest["request_id"]),
        version=integer(manifest, "version"),
        prompt_token_ids=tuple(np.frombuffer(manifest["prompt_token_ids"], "<i4").tolist()),
        sampling=SamplingParams(**sampling_fields),
        output_token_ids=output_token_ids,
        logprobs=logprobs,
        keeps=_flag(manifest, "keeps"),
        **read_turns(manifest),
    )
    prefix = integer(manifest, "prefix")
    if prefix < 0:
        raise ValueError(f"prefix = {prefix}")
    return layout, request, prefix


def _fields_of(manifest: Mapping[str, Any], name: str, kind: type[KvLayout | SamplingParams]) -> dict[str, Any]:
    """Returns all fields of ``kind``; none has a default. A string or a map is not accepted as a list."""
    found = dict(manifest[name])
    wrong = [each for each in LISTS if each in found and not isinstance(found[each], list)]
    if wrong or set(found) != {field.name for field in fields(kind)}:
        raise ValueError(f"{name} fields {sorted(found)}, no lists: {wrong}")
    return found
