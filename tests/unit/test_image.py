"""Images of weights in the trainer's memory: their checksums, notes and locks, and who may overwrite what."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.client.device_image import Images
from dora.client.taking import Taken, take_tensors
from dora.errors import InvalidValue
from dora.host.placement import VISIBLE, Gpu, Placement
from dora.host.proof import write_proof
from dora.models.tiny import make_tiny
from dora.ops.doctor import images
from dora.ops.doctor.verdict import Failed, Skipped, Subject
from dora.orchestrator.setup import check_engine
from dora.weights import cuda_image, image
from dora.weights.files import header_of
from dora.weights.image import NOTE_FILE, ImageNote, ImageRefused, noted, void, write_note
from dora.weights.reference import WEIGHTS_FILE, read_layout
from dora.weights.store import WeightStore
from tests import host_images
from tests.refusals import refused
from tests.service import configured

torch = pytest.importorskip("torch")
NOTE = ImageNote({"kind": "host", "number": 1}, "ab" * 32, 12, (bytes(range(16)), bytes(16)))


@given(st.integers(0, 70), st.integers(0, 3), st.integers(0, 2**32))
def test_the_checksum_is_that_of_integers(size: int, skipped: int, seed: int) -> None:
    from dora.weights.words import checksum

    content = np.random.default_rng(seed).integers(0, 256, skipped + size, np.uint8)[skipped:]
    filled = content.tobytes() + bytes(-size % 4)
    words = [int.from_bytes(filled[at : at + 4], "little", signed=True) for at in range(0, len(filled), 4)]
    expected = sum(words), sum(at * word for at, word in enumerate(words, 1))
    found = checksum(torch.from_numpy(content.copy()))
    assert found == b"".join((each % 2**64).to_bytes(8, "little") for each in expected)


def test_the_checksum_of_several_blocks_finds_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    from dora.weights import words

    content = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 4099, np.uint8))
    whole = words.checksum(content)
    monkeypatch.setattr(words, "BLOCK_BYTES", 512)
    assert words.checksum(content) == whole
    for at in range(0, 4099, 97):
        changed = content.clone()
        changed[at] ^= 1
        assert words.checksum(changed) != whole
    exchanged = content.clone()
    exchanged[0:4], exchanged[2048:2052] = content[2048:2052], content[0:4]
    assert words.checksum(exchanged) != whole


def test_a_note_is_read_as_it_was_written_and_void_once_it_is_emptied(tmp_path: Path) -> None:
    with noted(tmp_path) as missing:
        assert missing is None
    descriptor = write_note(tmp_path, NOTE)
    with noted(tmp_path) as found:
        assert found == NOTE
        assert not void(descriptor), "an engine reads"
        with noted(tmp_path) as again:
            assert again == NOTE, "engines read side by side"
    assert void(descriptor)
    with noted(tmp_path) as emptied:
        assert emptied is None
    assert (tmp_path / NOTE_FILE).stat().st_mode & 0o077 == 0
    os.close(descriptor)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        "{}",
        NOTE.text()[:-9],
        NOTE.text().replace("image_bytes", "bytes"),
        NOTE.text().replace("12", '"12"'),
        NOTE.text().replace('"number": 1', '"number": [1]'),
        NOTE.text().replace('"sums": "00', '"sums": "'),
        NOTE.text().replace('"sums": "00', '"sums": "zz'),
    ],
)
def test_a_note_that_no_trainer_wrote_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NOTE_FILE).write_text(text)
    with refused(ImageRefused), noted(tmp_path):
        pass


def test_a_note_that_is_a_link_a_pipe_or_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").write_text(NOTE.text())
    (tmp_path / NOTE_FILE).symlink_to(tmp_path / "other")
    with noted(tmp_path) as found:
        assert found is None
    (tmp_path / NOTE_FILE).unlink()
    os.mkfifo(tmp_path / NOTE_FILE)
    with noted(tmp_path) as found:
        assert found is None
    (tmp_path / NOTE_FILE).unlink()
    (tmp_path / NOTE_FILE).write_text(NOTE.text())
    monkeypatch.setattr(image, "NOTE_BYTES_MAX", 9)
    with refused(ImageRefused, field="image: note"), noted(tmp_path):
        pass


# ------------------------------------------------------------------------------------------------ a trainer's versions


class Publisher:
    """A trainer's copies and a store, without a service."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.store = WeightStore(folder, model)
        self.images = Images(host_images.made)
        self.tensors = {
            name: torch.from_numpy(np.random.default_rng(3).standard_normal(header.shape).astype(np.float32))
            for name, header in ((each.name, each) for each in self.store.reference.tensors)
        }

    def take(self, version: int) -> Taken:
        headers = {name: header_of(name, tensor) for name, tensor in self.tensors.items()}
        folder = self.store.begin(1, version)
        return take_tensors(self.tensors.items(), headers, folder, WEIGHTS_FILE, images=self.images)

    def publish(self, version: int) -> Path:
        with closing(self.take(version)) as taken:
            taken.examine()
            taken.bring(self.store.begin(1, version))
            return self.store.publish(1, version, taken.identities, None)

    def change(self) -> None:
        for tensor in self.tensors.values():
            tensor += 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def publisher(tmp_path: Path, model: Path) -> Iterator[Publisher]:
    found = Publisher(tmp_path / "store", model)
    yield found
    found.images.close()


def read(folder: Path) -> dict[str, Any] | None:
    """The tensors of a version as an engine reads them from its image; None: it has none."""
    from dora.worker.copying.image_source import image_source

    with noted(folder) as note:
        if note is None:
            return None
        source = image_source(note, host_images.opened, torch.device("cpu"))
        return dict(source([str(folder / WEIGHTS_FILE)], 60.0))


def test_each_version_has_an_image_that_equals_its_file(publisher: Publisher) -> None:
    from safetensors.torch import load_file

    for version in (1, 2):
        folder = publisher.publish(version)
        found, expected = read(folder), load_file(folder / WEIGHTS_FILE)
        assert found is not None and [*found] == [each.name for each in read_layout(folder / WEIGHTS_FILE)[1]]
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        publisher.change()
    assert read(publisher.store.folder(1)) is None, "the image of version 2 is where that of 1 was"


def test_a_version_that_is_taken_while_an_engine_reads_has_no_image(publisher: Publisher) -> None:
    first = publisher.publish(1)
    publisher.change()
    with noted(first) as note:
        assert note is not None
        second = publisher.publish(2)
        assert read(first) is not None and read(second) is None
    publisher.change()
    third = publisher.publish(3)
    assert read(first) is None and read(third) is not None


def test_a_trainer_that_closes_leaves_no_image(publisher: Publisher) -> None:
    folder = publisher.publish(1)
    publisher.images.close()
    assert read(folder) is None and (folder / WEIGHTS_FILE).is_file()


def test_an_image_that_differs_from_its_file_is_not_offered(publisher: Publisher) -> None:
    taken = publisher.take(1)
    host_images.MEMORY[max(host_images.MEMORY)][5] ^= 1
    taken.examine()
    taken.bring(publisher.store.begin(1, 1))
    assert read(publisher.store.publish(1, 1, taken.identities, None)) is None
    taken.close()


def test_an_image_that_changes_or_goes_is_refused(publisher: Publisher) -> None:
    folder = publisher.publish(1)
    memory = host_images.MEMORY[max(host_images.MEMORY)]
    memory[-1] ^= 1
    with refused(ImageRefused):
        read(folder)
    memory[-1] ^= 1
    assert read(folder) is not None
    del host_images.MEMORY[max(host_images.MEMORY)]
    with refused(ImageRefused, field="image: place"):
        read(folder)


def test_the_image_of_another_file_is_refused(publisher: Publisher) -> None:
    first = publisher.publish(1)
    text = (first / NOTE_FILE).read_text()
    publisher.change()
    second = publisher.publish(2)
    (second / NOTE_FILE).write_text(text)
    with refused(ImageRefused, field="image: blake3"):
        read(second)


def test_tensors_on_another_device_or_without_room_have_no_image(publisher: Publisher) -> None:
    publisher.images = Images(lambda _bytes, _device: None)
    assert read(publisher.publish(1)) is None
    publisher.images = Images()  # of GPUs: these tensors are on none
    assert read(publisher.publish(2)) is None


@pytest.mark.full
def test_the_doctors_proof_with_a_trainer_of_another_process(tmp_path: Path) -> None:
    found = images.prove(tmp_path, "cpu", "cpu", host_images.made, host_images.opened)
    assert found["image_bytes"] > 0
    with pytest.raises(Failed):
        images.prove(tmp_path / "none", "cpu", "cpu", cuda_image.made, host_images.opened)
    with pytest.raises(Skipped):
        images.images(Subject("cpu", tmp_path, tmp_path))


# --------------------------------------------------------------------------------------------------------- the setting

FIELD = "workers.weights_from"


def test_the_setting_needs_gpus_and_a_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("dora.orchestrator.setup.find_spec", lambda _: True)
    for named in ({"workers__engine": "fake"}, {"workers__device": "cpu"}, {}):
        with refused(InvalidValue, field=FIELD):
            configured(tmp_path, workers__weights_from="trainer", **named)
    config = configured(tmp_path, workers__device="cuda", workers__weights_from="trainer")
    with refused(InvalidValue, field=FIELD):
        check_engine(config)
    write_proof("ranks", {})
    with refused(InvalidValue, field=FIELD):
        check_engine(config)
    write_proof("images", {})
    check_engine(config)


def test_a_worker_sees_the_trainers_gpus_behind_its_own() -> None:
    found = tuple(Gpu("H100", f"GPU-{number}", f"0000:{number}") for number in range(4))
    placement = Placement(found[:3], found)
    assert placement.environment(1, 1)[VISIBLE] == "GPU-1"
    assert placement.environment(1, 1, shows_trainers=True)[VISIBLE] == "GPU-1,GPU-3"
