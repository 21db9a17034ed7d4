"""Generated weight folders: each is refused with a reason, or holds exactly the tensors that the model has."""

import json
import math
import os
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

from dora.client.publication import place_weights
from dora.errors import InvalidValue
from dora.weights.files import WeightFile, hash_file
from dora.weights.store import WeightStore

NAME: Final = "model.safetensors"
VALUES: Final = (0, 1, -1, 1 << 31, 1 << 62, 1 << 64, 10**30, 1.5, True, None, "1", [], {}, [1], math.inf)
DTYPES: Final = ("F32", "BF16", "F16", "I32", "BOOL", "F8_E4M3", "F4", "", "f32", 7, None, ["F32"])


@dataclass
class Outcome:
    folders: int = 0
    accepted: int = 0
    refused: int = 0
    bugs: list[str] = field(default_factory=list)
    took_s: float = 0.0


class Folders:
    """Makes folders from a model's one file."""

    def __init__(self, model: Path, chance: random.Random) -> None:
        content = (model / NAME).read_bytes()
        length = int.from_bytes(content[:8], "little")
        self._header: dict[str, Any] = json.loads(content[8 : 8 + length])
        self._tensors = content[8 + length :]
        self._arrays: dict[str, np.ndarray[Any, Any]] = load_file(model / NAME)
        self._chance = chance

    def make(self, folder: Path) -> str:
        """Writes one into an empty folder. Returns what was done."""
        kinds = (
            self._whole, self._split, self._header_edited, self._header_edited, self._header_edited, self._bytes_turned,
            self._cut, self._length, self._infinite, self._renamed, self._linked, self._more_files, self._odd_files,
        )  # fmt: skip
        kind = self._chance.choice(kinds)
        kind(folder)
        return kind.__name__

    def _write(self, folder: Path, header: dict[str, Any], tensors: bytes, name: str = NAME) -> None:
        text = json.dumps(header).encode()
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + tensors)

    def _whole(self, folder: Path) -> None:
        self._write(folder, self._header, self._tensors)

    def _split(self, folder: Path) -> None:
        names = sorted(self._arrays)
        cut = self._chance.randrange(1, len(names))
        for number, part in enumerate((names[:cut], names[cut:])):
            save_file({name: self._arrays[name] for name in part}, folder / f"model-{number}.safetensors")

    def _header_edited(self, folder: Path) -> None:
        chance = self._chance
        header = json.loads(json.dumps(self._header))
        for _ in range(chance.randint(1, 3)):
            names = [name for name in header if name != "__metadata__"] or ["a"]
            name, entry = chance.choice(names), header.get(chance.choice(names))
            kind = chance.randrange(7)
            if kind == 0:
                header.pop(name, None)
            elif kind == 1:
                header[chance.choice(("", "a", name + "\0", "x" * 2000, "\ud800", name.upper()))] = entry
            elif kind == 2 or not isinstance(entry, dict):
                header[name] = chance.choice(VALUES)
            elif kind == 3:
                entry["dtype"] = chance.choice(DTYPES)
            elif kind == 4:
                entry["shape"] = chance.choice([chance.choice(VALUES), [chance.choice(VALUES)] * chance.randint(0, 70)])
            elif kind == 5:
                entry["data_offsets"] = [chance.choice(VALUES), chance.choice(VALUES)]
            else:
                entry[chance.choice(("more", "dtype", "shape"))] = chance.choice(VALUES)
        self._write(folder, header, self._tensors)

    def _bytes_turned(self, folder: Path) -> None:
        self._whole(folder)
        content = bytearray((folder / NAME).read_bytes())
        end = len(content) - len(self._tensors) if self._chance.random() < 0.7 else len(content)
        for _ in range(self._chance.randint(1, 6)):
            content[self._chance.randrange(end)] ^= 1 << self._chance.randrange(8)
        (folder / NAME).write_bytes(content)

    def _cut(self, folder: Path) -> None:
        self._whole(folder)
        size = (folder / NAME).stat().st_size
        os.truncate(folder / NAME, self._chance.choice((0, 4, 8, 9, size // 2, size - 1, size + 1, 2 * size)))

    def _length(self, folder: Path) -> None:
        self._whole(folder)
        with (folder / NAME).open("r+b") as file:
            length = self._chance.choice((0, 1, 2, 1 << 20, 1 << 32, 100_000_001, (1 << 63) - 1, (1 << 64) - 1))
            file.write(length.to_bytes(8, "little"))

    def _infinite(self, folder: Path) -> None:
        arrays = dict(self._arrays)
        name = self._chance.choice(sorted(arrays))
        array = arrays[name].copy()
        array.reshape(-1)[self._chance.randrange(array.size)] = self._chance.choice((math.nan, math.inf, -math.inf))
        save_file({**arrays, name: array}, folder / NAME)

    def _renamed(self, folder: Path) -> None:
        odd = ("a.safetensors", ".a.safetensors", "model.bin", "x" * 240 + ".safetensors", "m\n.safetensors", NAME)
        self._write(folder, self._header, self._tensors, self._chance.choice(odd))

    def _linked(self, folder: Path) -> None:
        target = self._chance.choice(("/etc/passwd", "/dev/zero", "nowhere", NAME, "..", "/proc/self/mem"))
        (folder / NAME).symlink_to(target)

    def _more_files(self, folder: Path) -> None:
        self._whole(folder)
        for number in range(self._chance.choice((1, 2, 300))):
            self._write(folder, {}, b"", f"more-{number}.safetensors")

    def _odd_files(self, folder: Path) -> None:
        if self._chance.random() < 0.5:
            (folder / NAME).mkdir()
        else:
            os.mkfifo(folder / NAME)


def stormed(model: Path, scratch: Path, count: int, seed: int) -> Outcome:
    """``count`` folders, each placed by the client, then published as a trainer on the same host announces it."""
    outcome, chance, began_s = Outcome(), random.Random(seed), time.monotonic()
    store = WeightStore(scratch / "store", model)
    folders = Folders(model, chance)
    for _ in range(count):
        _one(store, folders, scratch / "placed", chance, outcome)
    outcome.took_s = time.monotonic() - began_s
    return outcome


def _one(store: WeightStore, folders: Folders, placed: Path, chance: random.Random, outcome: Outcome) -> None:
    expected = {each.name: each.shape for each in store.reference.tensors}
    made = store.begin(1, 1)
    kind = f"{folders.make(made)} {outcome.folders}"
    outcome.folders += 1
    try:
        place_weights(made, store.reference.tensors, placed)
        if _shapes(placed) != expected:
            outcome.bugs.append(f"{kind}: placed with other tensors")
    except InvalidValue as refused:
        str(refused).encode()  # it has to travel
    except Exception as error:
        outcome.bugs.append(f"{kind}: placing: {error!r}")
    try:
        store.publish(1, 1, _announced(made, chance), None)
        outcome.accepted += 1
        if _shapes(store.folder(1)) != expected:
            outcome.bugs.append(f"{kind}: published with other tensors")
    except InvalidValue as refused:
        str(refused).encode()
        outcome.refused += 1
    except Exception as error:
        outcome.bugs.append(f"{kind}: publishing: {error!r}")
    store.retire(1)
    store.discard(1)
    shutil.rmtree(placed, ignore_errors=True)


def _announced(folder: Path, chance: random.Random) -> list[WeightFile]:
    """As a trainer would announce them; sometimes not as they are."""
    announced = []
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors" and file.is_file() and not file.is_symlink():
            announced.append(hash_file(file))
        else:
            announced.append(WeightFile(file.name, 4, bytes(32)))
    if announced and chance.random() < 0.1:
        first = announced[0]
        announced[0] = chance.choice(
            (
                WeightFile(first.name, first.file_bytes + 1, first.blake3),
                WeightFile(first.name, first.file_bytes, bytes(32)),
                WeightFile("../" + first.name, first.file_bytes, first.blake3),
                WeightFile("other.safetensors", first.file_bytes, first.blake3),
            )
        )
    return announced


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """As the library that engines use reads them."""
    found: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, "np") as library:
            names = library.keys()
            found |= {name: tuple(library.get_slice(name).get_shape()) for name in names}
            assert all(np.isfinite(library.get_tensor(name)).all() for name in names)
    return found
