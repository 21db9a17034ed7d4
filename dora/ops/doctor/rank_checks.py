"""The stage that proves engines of two ranks, by tensors and by stages, against an engine of one."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dora.data.types import SamplingParams
from dora.errors import InvalidValue, SnapshotRefused
from dora.ops.doctor.engine_checks import PLAIN, check_moves, engine_of, finished, joined, request, stepped
from dora.ops.doctor.verdict import Failed, Skipped, Subject

if TYPE_CHECKING:
    from dora.worker.vllm.engine import VllmEngine

KV_TOKENS: Final = 8192
MEMORY_SHARE: Final = 0.4  # an engine that was closed may still have its memory
WHOLE_BYTES: Final = 16 << 30  # a larger model has no room in that share of any GPU
SPLITS: Final[tuple[dict[str, Any], ...]] = ({"tensor_parallel": 2}, {"pipeline_parallel": 2})


def ranks(subject: Subject) -> dict[str, Any]:
    """Proves both splits: ranks that share each layer, and stages of layers.

    On GPUs writes the proof that lifts the refusal of such engines (``dora.host.proof``).
    """
    if subject.device == "cuda":
        import torch

        if torch.cuda.device_count() < 2:
            raise Skipped(f"{torch.cuda.device_count()} GPUs are visible")
    subject = replace(subject, model=_model(subject))
    alone = engine_of(subject, KV_TOKENS, memory_share=MEMORY_SHARE)
    canary = alone.load_weights(0, subject.model, None)
    alone.close()
    found: dict[str, Any] = {"model": str(subject.model)}
    for split in SPLITS:
        engine = engine_of(subject, KV_TOKENS, memory_share=MEMORY_SHARE, **split)
        engine.load_weights(0, subject.model, canary)
        sampling = replace(PLAIN, max_tokens=engine.capability.block_tokens + 8)
        moved = check_moves(engine, [sampling])
        _check_all_or_none(engine, sampling)
        (name,) = split
        found[name] = {"moves": moved, "shards": len(engine.layout.layers), "backend": engine.layout.backend}
        engine.close()
    if subject.device == "cuda":
        from dora.host.proof import write_proof

        try:
            found["proof"] = str(write_proof("ranks", found))
        except OSError as error:
            raise Failed(f"the proof cannot be written: {error}", **found) from error
    return found


def _check_all_or_none(engine: "VllmEngine", sampling: SamplingParams) -> None:
    """A snapshot without one shard must be refused, and its request go on as if it had not been asked."""
    stayed = finished(engine, [request("stays", sampling)])["stays"]
    engine.add(request("half", sampling))
    before = stepped(engine, "half", 6)
    engine.freeze("half")
    snapshot = engine.export("half")
    if snapshot is None:
        raise Failed("KV of a request that decodes cannot move")
    *rest, _ = snapshot.blocks
    half = replace(
        snapshot,
        request=replace(snapshot.request, request_id="other"),
        blocks={name: snapshot.blocks[name] for name in rest},
    )
    try:
        engine.take_in(half)
    except SnapshotRefused:
        pass
    else:
        raise Failed("a snapshot without one of its shards was taken in")
    engine.thaw("half")
    token_ids, _ = joined(before, finished(engine, [], "half")["half"])
    if token_ids != stayed[0]:
        raise Failed("after a refused snapshot, its request continues with other tokens")


def _model(subject: Subject) -> Path:
    from dora.models import check_parallel
    from dora.models.tiny import make_tiny

    try:
        check_parallel(subject.model, 2, 2)
        if sum(file.stat().st_size for file in subject.model.glob("*.safetensors")) <= WHOLE_BYTES:
            return subject.model
    except InvalidValue:
        pass
    return make_tiny("dense", subject.folder / "tiny", seed=1, kv_heads=2)
