"""Proves images of weights (dora.weights.image) with a trainer in a process of its own: read, changed, and gone."""

import multiprocessing
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora.client.device_image import Images, Make
from dora.client.taking import take_tensors
from dora.host.proof import write_proof
from dora.models.tiny import make_tiny
from dora.ops.doctor.verdict import Failed, Skipped, Subject
from dora.weights import cuda_image
from dora.weights.files import header_of
from dora.weights.image import ImageRefused, noted
from dora.weights.reference import WEIGHTS_FILE
from dora.weights.store import WeightStore

if TYPE_CHECKING:
    import torch

    from dora.worker.copying.image_source import Open

ANSWER_S = 60.0


def images(subject: Subject) -> dict[str, Any]:
    """Reads weights in a trainer's GPU from another process, on another GPU if there are two.

    Writes the proof that lifts the refusal of ``workers.weights_from = trainer``.
    """
    if subject.device != "cuda":
        raise Skipped("on CPUs engines map the trainer's own copy in shared memory")
    import torch

    found = prove(subject.folder, f"cuda:{torch.cuda.device_count() - 1}", "cuda:0", cuda_image.made, cuda_image.opened)
    found["proof"] = str(write_proof("images", found))
    return found


def prove(folder: Path, trainers: str, engines: str, make: Make, opened: "Open") -> dict[str, Any]:
    """Runs the proof between two devices. Raises Failed."""
    model, context = make_tiny("dense", folder / "model"), multiprocessing.get_context("spawn")
    told, its = context.Pipe()
    trainer = context.Process(target=_train, args=(folder / "store", model, trainers, make, its), daemon=True)
    trainer.start()
    try:
        version = Path(_ask(told, "publish"))
        for _ in range(2):  # as two engines would
            size_bytes = _check_equal(version, engines, opened)
        _ask(told, "change")
        _check_refused(version, engines, opened, "a changed image")
        _ask(told, "change back")
        _check_equal(version, engines, opened)
    finally:
        trainer.kill()
        trainer.join()
    _check_refused(version, engines, opened, "the image of a trainer that was killed")
    return {"image_bytes": size_bytes, "trainer": trainers, "engine": engines}


def _ask(told: Connection, what: str) -> str:
    told.send(what)
    if not told.poll(ANSWER_S):
        raise Failed(f"the trainer's process did not {what} in {ANSWER_S:g} s")
    try:
        answer: str = told.recv()
    except EOFError:
        raise Failed(f"the trainer's process ended before it could {what}") from None
    return answer


def _train(store_folder: Path, model: Path, device: str, make: Make, told: Connection) -> None:
    from safetensors.torch import load_file

    kept: list[torch.Tensor] = []

    def made(image_bytes: int, on: "torch.device") -> Any:
        found = make(image_bytes, on)
        kept.extend(found[:1] if found is not None else ())
        return found

    store, images = WeightStore(store_folder, model), Images(made)
    tensors = {name: tensor.to(device) for name, tensor in load_file(model / WEIGHTS_FILE).items()}
    while True:
        what = told.recv()
        if what == "publish":
            headers, incoming = {name: header_of(name, each) for name, each in tensors.items()}, store.begin(1, 1)
            with closing(take_tensors(tensors.items(), headers, incoming, WEIGHTS_FILE, images=images)) as taken:
                taken.examine()
                taken.bring(incoming)
                told.send(str(store.publish(1, 1, taken.identities, None)))
        else:
            kept[0][len(kept[0]) // 2] ^= 1
            told.send(str(int(kept[0].sum())))  # waits for the device


def _read(version: Path, device: str, opened: "Open") -> "dict[str, torch.Tensor]":
    import torch

    from dora.worker.copying.image_source import image_source

    with noted(version) as note:
        if note is None:
            raise Failed("the trainer's version has no image: its device has no room, or shares no memory")
        return dict(image_source(note, opened, torch.device(device))([str(version / WEIGHTS_FILE)], ANSWER_S))


def _check_equal(version: Path, device: str, opened: "Open") -> int:
    import torch
    from safetensors.torch import load_file

    found = _read(version, device, opened)
    for name, tensor in load_file(version / WEIGHTS_FILE).items():
        if not torch.equal(found[name].cpu(), tensor):
            raise Failed(f"{name} was read from the image with other bytes")
    return sum(tensor.nbytes for tensor in found.values())


def _check_refused(version: Path, device: str, opened: "Open", what: str) -> None:
    try:
        _read(version, device, opened)
    except ImageRefused:
        return
    raise Failed(f"{what} was not refused")
