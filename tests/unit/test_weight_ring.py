"""Weights on their way to a device through pinned memory, on a device that runs copies as late as events allow."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dora.config import Config
from dora.errors import DeadlineExceeded, InvalidValue
from dora.host.command import LaunchContext, worker_argv
from dora.orchestrator.setup import with_load_time
from dora.rpc import dora_pb2 as pb
from dora.session.failure import fail
from dora.weights.load_time import READ_SHARE, LoadDeadline, load_limit_s
from dora.weights.reference import DTYPE_BYTES, Reference, TensorHeader, read_layout
from dora.worker.copying import weight_ring
from dora.worker.copying.streams import DONE, Mark
from dora.worker.copying.weight_ring import DTYPES, FilePiece, Slot, WeightRing
from tests.refusals import refused
from tests.streams import Simulated, Work, _nothing

SLOTS = 3
SLOT_BYTES = 24
LONG_S = 1e6
RUNS = 100


class Corrupted(AssertionError):
    """The model does not have the bytes of the version that was loaded."""


# ------------------------------------------------------------------------------------------------------ the real thing


def files_of(folder: Path, seed: int) -> list[Path]:
    """Two files. Tensors have odd sizes, one is empty, one has no axis, and some are larger than a slot."""
    drawn = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, generator=drawn, dtype=torch.int8)

    folder.mkdir(exist_ok=True)
    first = {"a": some(7), "b": some(5, 11), "c": some(48), "d": some(0), "e": some(1)}
    second = {"f": some(24), "g": some(3).float(), "h": torch.tensor(float(seed), dtype=torch.bfloat16), "i": some(2)}
    for name, tensors in (("1.safetensors", first), ("2.safetensors", second)):
        save_file(tensors, folder / name)
    return [folder / "1.safetensors", folder / "2.safetensors"]


def content_of(files: Sequence[Path]) -> dict[str, np.ndarray]:
    found = {}
    for file in files:
        at, tensors = read_layout(file)
        raw = np.fromfile(file, np.uint8)
        for tensor in tensors:
            found[tensor.name] = raw[at : at + tensor.content_bytes]
            at += tensor.content_bytes
    return found


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    base = tmp_path_factory.mktemp("versions")
    return [files_of(base / str(seed), seed) for seed in range(2)]


def forever(files: Sequence[Path]) -> LoadDeadline:
    return LoadDeadline(LONG_S, 1)


@pytest.mark.parametrize("slot_bytes", [1, 7, 24, 1 << 20])
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_tensors_arrive_as_they_are_in_the_files(versions: list[list[Path]], slots: int, slot_bytes: int) -> None:
    ring = WeightRing(torch.device("cpu"), slots=slots, slot_bytes=slot_bytes)
    for files in [*versions, versions[0]]:
        expected = content_of(files)
        found = dict(ring.tensors(files, forever(files)))
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert np.array_equal(tensor.reshape(-1).view(torch.uint8).numpy(), expected[name]), name
    assert found["b"].shape == (5, 11) and found["h"].dtype == torch.bfloat16 and found["h"].dim() == 0


def test_every_dtype_of_safetensors_has_one_of_torch() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == DTYPE_BYTES


# ------------------------------------------------------------------------------------- any order of copies and kernels


class DrawnFill(Future[None]):
    """Runs when it is waited for, if not before."""

    def __init__(self, fillers: "DrawnFillers") -> None:
        super().__init__()
        self._fillers = fillers

    def result(self, timeout: float | None = None) -> None:
        self._fillers.until(self)
        super().result(0)


@dataclass
class DrawnFillers(Executor):
    """Threads that run their tasks late, in any order."""

    random: random.Random
    waiting: dict[DrawnFill, Callable[[], None]] = field(default_factory=dict)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        fill = DrawnFill(self)
        self.waiting[fill] = partial(fn, *args, **kwargs)
        while self.waiting and self.random.random() < 0.4:
            self.until(self.random.choice(list(self.waiting)))
        return fill

    def until(self, wanted: DrawnFill) -> None:
        while not wanted.done():
            fill = self.random.choice(list(self.waiting))
            run = self.waiting.pop(fill)
            if fill.set_running_or_notify_cancel():
                try:
                    fill.set_result(run())
                except BaseException as error:
                    fill.set_exception(error)


@dataclass
class Model:
    """An engine's tensors, whose addresses stay, and its stream."""

    seed: int
    ring_class: type[WeightRing] = WeightRing
    device_class: type[Simulated] = Simulated

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.device = self.device_class(self.random)
        self.fillers = DrawnFillers(self.random)
        self.ring = self.ring_class(
            torch.device("cpu"), slots=SLOTS, slot_bytes=SLOT_BYTES, streams=self.device, fillers=self.fillers
        )
        self.tensors: dict[str, torch.Tensor] = {}

    def load(self, files: Sequence[Path], given_up_at: str = "") -> None:
        """Loads as vLLM does: a kernel on the engine's stream takes each tensor. ``given_up_at``: a tensor."""
        with closing(cast(Any, self.ring.tensors(files, forever(files)))) as tensors:
            for name, tensor in tensors:
                raw = tensor.reshape(-1).view(torch.uint8)
                if name == given_up_at:
                    break
                place = self.tensors.setdefault(name, torch.zeros_like(raw))
                self.device.kernel(partial(place.copy_, raw))
                self.device.free(raw)
                self.device.some()
        self.device.free(raw)

    def step(self, expected: dict[str, np.ndarray]) -> None:
        wrong: list[str] = []

        def forward() -> None:
            found = {name: self.tensors[name].numpy() for name in expected}
            wrong.extend(name for name, rows in expected.items() if not np.array_equal(found[name], rows))

        self.device.kernel(forward).synchronize()
        if wrong:
            raise Corrupted(wrong)


def conduct(model: Model, versions: list[list[Path]]) -> None:
    """Loads one version, gives up the other in its middle, and loads the first again, with a step after each load."""
    first, other = versions
    expected = content_of(first)
    model.load(first)
    model.step(expected)
    addresses = {name: tensor.data_ptr() for name, tensor in model.tensors.items()}
    model.load(other, given_up_at=model.random.choice([*"abcfg"]))
    model.load(first)
    model.step(expected)
    assert {name: tensor.data_ptr() for name, tensor in model.tensors.items()} == addresses


def test_no_order_of_copies_and_kernels_changes_what_a_model_gets(versions: list[list[Path]]) -> None:
    for seed in range(RUNS):
        conduct(Model(seed), versions)


class NoMarks(Simulated):
    """As after an import of vLLM's CPU modules: events of which nothing is known."""

    def mark(self) -> Mark:
        return DONE


class MarksTooEarly(Simulated):
    """The event is recorded before the copy that it stands for."""

    def mark(self) -> Mark:
        event = super().mark()
        self.copies.remove(event.work)  # type: ignore[attr-defined]
        event.work.is_done = True  # type: ignore[attr-defined]
        return event


class HoldsUpNothing(Simulated):
    """The engine's step waits for no copy."""

    def hold_up(self, mark: Mark) -> None:
        pass


class HoldsUpTheFirst(Simulated):
    """The engine's step waits for the first copy only."""

    def hold_up(self, mark: Mark) -> None:
        super().hold_up(self.__dict__.setdefault("first", mark))


class CopiesAtOnce(Simulated):
    """Copies do not wait for the engine, which may still read the memory that they write."""

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()


class CopiesBesideTheLine(Simulated):
    """Some copies run on another stream than the events."""

    def _queue_copy(self, work: Work) -> Work:
        if self.random.random() < 0.5 and work.run is not _nothing:
            self.engine.append(work)
            return work
        return super()._queue_copy(work)


class ReusesSlots(WeightRing):
    """A slot is filled before its copies are complete."""

    def _fill(self, slot: Slot, piece: FilePiece, ahead_bytes: int) -> None:
        slot.mark = DONE
        super()._fill(slot, piece, ahead_bytes)


class FillsThenWaits(WeightRing):
    """The wait for a slot's copies comes after the slot is filled."""

    def _fill(self, slot: Slot, piece: FilePiece, ahead_bytes: int) -> None:
        weight_ring.read(piece, slot.memory[: piece.size_bytes], ahead_bytes)
        slot.mark.synchronize()


class MarksBeforeCopies(WeightRing):
    """A slot's event is recorded before its copy is queued."""

    def _copy_later(self, place: torch.Tensor, index: int, at: int) -> Mark:
        with self._streams.entered():
            early = self._streams.mark()
        mark = super()._copy_later(place, index, at)
        self._slots[index % len(self._slots)].mark = early
        return mark


class OneSlotForTwo(WeightRing):
    """Two slots share their memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots[1].memory = self._slots[0].memory


class FillsTooEarly(WeightRing):
    """A slot's next piece is asked for before the last copy from it is queued."""

    def _fill_later(self, index: int, pieces: Sequence[FilePiece]) -> None:
        super()._fill_later(index, pieces)
        if index == len(self._slots) - 1:
            super()._fill_later(index + 1, pieces)


class LeavesOutTheEnd(WeightRing):
    """The last piece of a file is not a whole slot, and only whole words of it are read."""

    def _fill(self, slot: Slot, piece: FilePiece, ahead_bytes: int) -> None:
        whole = FilePiece(piece.file, piece.offset, piece.size_bytes // 8 * 8)
        super()._fill(slot, whole, ahead_bytes)


class GoesOnInTheNextFile(WeightRing):
    """Pieces are whole slots, so the last one of a file begins where the next file's should."""

    def _planned(self, files: Sequence[Path]) -> Any:
        pieces, tensors = super()._planned(files)
        return [
            FilePiece(each.file, each.offset, max(1, each.size_bytes // 8 * 8)) for each in pieces
        ] + pieces, tensors


class AwaitsNoFill(WeightRing):
    """A copy is queued before its slot is filled."""

    def _await_fill(self, index: int, deadline: LoadDeadline) -> None:
        self._fills.pop(index)


class ForgetsFillers(WeightRing):
    """Fillers of a load that was given up write into slots of the next."""

    def _finish_earlier(self, deadline: LoadDeadline) -> None:
        self._fills.clear()


PLANTED: dict[str, Callable[[int], Model]] = {
    "a slot is reused before its copies' event": lambda seed: Model(seed, ReusesSlots),
    "the wait comes after the fill": lambda seed: Model(seed, FillsThenWaits),
    "a slot's event is recorded before its copy": lambda seed: Model(seed, MarksBeforeCopies),
    "every event is recorded before its copy": lambda seed: Model(seed, device_class=MarksTooEarly),
    "events that are none": lambda seed: Model(seed, device_class=NoMarks),
    "the engine's step waits for nothing": lambda seed: Model(seed, device_class=HoldsUpNothing),
    "the engine's step waits for the first copy": lambda seed: Model(seed, device_class=HoldsUpTheFirst),
    "copies into memory that the engine still reads": lambda seed: Model(seed, device_class=CopiesAtOnce),
    "copies on two streams": lambda seed: Model(seed, device_class=CopiesBesideTheLine),
    "two slots with one memory": lambda seed: Model(seed, OneSlotForTwo),
    "a slot is asked for before its last copy": lambda seed: Model(seed, FillsTooEarly),
    "the end of a partial last piece is left out": lambda seed: Model(seed, LeavesOutTheEnd),
    "a partial last piece is cut": lambda seed: Model(seed, GoesOnInTheNextFile),
    "a copy of a slot that is not filled yet": lambda seed: Model(seed, AwaitsNoFill),
    "fillers of a load that was given up": lambda seed: Model(seed, ForgetsFillers),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_order_is_found(fault: str, versions: list[list[Path]]) -> None:
    for seed in range(RUNS):
        try:
            conduct(PLANTED[fault](seed), versions)
        except Corrupted:
            return
    pytest.fail(f"not found in {RUNS} runs: {fault}")


# ------------------------------------------------------------------------------------------------------------ deadlines


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Stuck(Executor):
    """Threads that a disk holds up."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        fill: Future[None] = Future()
        fill.set_running_or_notify_cancel()
        return fill


def test_a_load_that_is_too_slow_is_refused_with_its_numbers(versions: list[list[Path]]) -> None:
    ring, clock = WeightRing(torch.device("cpu"), slots=2, slot_bytes=16), Clock()
    with refused(DeadlineExceeded, field="load_s", value=12.0, names=[10, 1000]):
        for name, _ in ring.tensors(versions[0], LoadDeadline(10.0, 1000, clock)):
            clock.now_s = 12.0 if name == "a" else 0.0
    found = dict(ring.tensors(versions[0], forever(versions[0])))
    assert np.array_equal(found["c"].view(torch.uint8).numpy(), content_of(versions[0])["c"])


def test_a_read_that_does_not_end_is_refused_and_so_is_the_next_load_beside_it(versions: list[list[Path]]) -> None:
    ring = WeightRing(torch.device("cpu"), slots=2, slot_bytes=16, fillers=Stuck())
    for _ in range(2):
        with refused(DeadlineExceeded, field="load_s", names=[1000]):
            list(ring.tensors(versions[0], LoadDeadline(0.0, 1000, Clock())))


def test_a_file_that_is_missing_or_too_short_is_refused(versions: list[list[Path]], tmp_path: Path) -> None:
    file = files_of(tmp_path / "v", 5)[0]
    size_bytes = file.stat().st_size
    memory = np.zeros(16, np.uint8)
    with refused(InvalidValue, field="weights file", value=str(file)):
        weight_ring.read(FilePiece(file, size_bytes - 3, 16), memory, 0)
    file.unlink()
    with refused(InvalidValue, field="weights file", value=str(file)):
        weight_ring.read(FilePiece(file, 0, 16), memory, 0)


def test_a_fill_that_fails_ends_the_load_and_the_next_load_is_whole(versions: list[list[Path]], tmp_path: Path) -> None:
    ring = WeightRing(torch.device("cpu"), slots=2, slot_bytes=16)
    files = files_of(tmp_path / "v", 5)

    def cut() -> Iterator[str]:
        for name, _ in ring.tensors(files, forever(files)):
            files[0].write_bytes(files[0].read_bytes()[:-20])
            yield name

    with refused(InvalidValue, field="weights file"):
        list(cut())
    found = dict(ring.tensors(versions[1], forever(versions[1])))
    assert np.array_equal(found["b"].reshape(-1).view(torch.uint8).numpy(), content_of(versions[1])["b"])


@pytest.mark.parametrize(
    ("weights_bytes", "asked_s", "limit_s"), [(0, 60.0, 60.0), (65 * 10**9, 60.0, 680.0), (65 * 10**9, 3600.0, 3600.0)]
)
def test_the_limit_of_a_load_follows_from_its_bytes(weights_bytes: int, asked_s: float, limit_s: float) -> None:
    assert load_limit_s(weights_bytes, asked_s) == limit_s


def test_a_load_that_is_too_slow_counts_against_the_worker_and_not_the_version() -> None:
    outcome = pb.WorkerOutcome()
    fail("load_version", outcome, LoadDeadline(1.0, 1000, Clock()).exceeded())
    assert (outcome.ok, outcome.error_kind) == (False, "refused")


def test_the_service_and_its_workers_have_the_same_limit() -> None:
    """The worker refuses before the service replaces it."""
    large = Reference(Path(), (), (TensorHeader("w", "BF16", (65 * 10**9 // 2,)),), 10)
    workers = with_load_time(Config(), large).workers
    assert workers.load_timeout_s == load_limit_s(large.content_bytes, Config().workers.load_timeout_s) == 680.0
    argv = worker_argv(workers, "w0", LaunchContext("localhost:1", Path()))
    assert float(argv[argv.index("--load-timeout-s") + 1]) == workers.load_timeout_s
    assert with_load_time(with_load_time(Config(), large), large).workers == workers
    assert READ_SHARE < 1
