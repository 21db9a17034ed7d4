"""An agent checks a kept folder, and reports only whole versions."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dora.host.command import LaunchContext
from dora.host.files import digest_of, model_files
from dora.host.folder import MODEL, WEIGHTS, host_folder
from dora.host.runtime import HostRuntime
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.weights.host_store import HostStore
from dora.weights.reference import read_reference
from dora.weights.store import WeightStore
from tests.contract.relays import FILE, SECRET, a_host, publish
from tests.service import configured


class Service:
    """Gives out the model's files, as ``Files`` does; ``given``: those that were asked for."""

    def __init__(self, model: Path) -> None:
        self.model, self.given = model, list[str]()
        self.files = model_files(read_reference(model))
        self.ends_at = ""  # the file at which it is lost

    async def list(self) -> pb.ListFilesReply:
        return pb.ListFilesReply(
            files=[pb.ModelFile(name=each.name, file_bytes=each.file_bytes, blake3=each.blake3) for each in self.files]
        )

    async def content(self, name: str) -> AsyncIterator[bytes]:
        self.given.append(name)
        if name == self.ends_at:
            raise ServiceUnavailable("the test ends it")
        yield (self.model / name).read_bytes()


async def ready(folder: Path, service: Service, model: Path | None = None) -> pb.HostReady:
    """Returns the agent's first message, in a stay that ends at once. ``model``: its folder on the machine."""
    said: list[pb.HostMessage] = []
    place = LaunchContext("127.0.0.1:1", model or folder / MODEL, "h1", str(folder), "127.0.0.1")
    runtime = HostRuntime(place, "cpu", said.append, has_model=model is not None)
    settings = configured(service.model, workers__engine="fake").model_dump_json(include={"workers", "kv"})
    welcome = pb.HostWelcome(
        epoch=1,
        settings_json=settings,
        model_digest=digest_of(service.files),
        versions_most=3,
        relay_secret=SECRET,
    )

    async def none() -> AsyncIterator[pb.HostOrder]:
        for order in ():
            yield order

    try:
        assert await runtime.run(welcome, none(), service) is None  # type: ignore[arg-type]
    finally:
        await runtime.close()
    return said[0].ready


def fetched(origin: WeightStore, folder: Path, model: Path, *versions: int) -> list[str]:
    """Brings versions into the store of a host's folder. Returns their names."""
    names = [publish(origin, version) for version in versions]
    with a_host(origin, "origin") as source, a_host(HostStore(folder / WEIGHTS, model), "h1") as host:
        for name in names:
            host.fetch(name, source)
            host.arrived()
    return names


def alter(file: Path) -> None:
    """A page that never got to the disk."""
    content = bytearray(file.read_bytes())
    content[-4096:] = bytes(4096)
    file.write_bytes(content)


async def test_of_the_versions_that_are_kept_only_whole_ones_are_told(tiny_dense: Path, tmp_path: Path) -> None:
    with host_folder(str(tmp_path / "host")) as folder:
        origin = WeightStore(tmp_path / "origin", tiny_dense)
        names = await asyncio.to_thread(fetched, origin, folder, tiny_dense, 1, 2)
        assert (await ready(folder, Service(tiny_dense), tiny_dense)).held == names
        alter(folder / WEIGHTS / "versions" / "1" / FILE)
        assert (await ready(folder, Service(tiny_dense), tiny_dense)).held == names[1:]
        assert HostStore(folder / WEIGHTS, tiny_dense).versions() == (0, 2)


async def test_a_kept_model_is_checked_and_what_is_damaged_of_it_is_brought_again(
    tiny_dense: Path, tmp_path: Path
) -> None:
    with host_folder(str(tmp_path / "host")) as folder:
        first = Service(tiny_dense)
        await ready(folder, first)
        assert sorted(first.given) == sorted(file.name for file in first.files)
        names = await asyncio.to_thread(fetched, WeightStore(tmp_path / "o", tiny_dense), folder, folder / MODEL, 1)
        alter(folder / MODEL / FILE)
        second = Service(tiny_dense)
        assert (await ready(folder, second)).held == names
        assert second.given == [FILE]
        assert (folder / MODEL / FILE).read_bytes() == (tiny_dense / FILE).read_bytes()


async def test_a_model_that_came_in_part_goes_on_to_come(tiny_dense: Path, tmp_path: Path) -> None:
    with host_folder(str(tmp_path / "host")) as folder:
        first, second = Service(tiny_dense), Service(tiny_dense)
        first.ends_at = FILE
        with pytest.raises(ServiceUnavailable):
            await ready(folder, first)
        await ready(folder, second)
        assert sorted(first.given[:-1] + second.given) == sorted(file.name for file in first.files)


async def test_another_model_takes_the_place_of_the_one_that_was_kept(tiny_dense: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_dense, other)
    alter(other / FILE)
    (other / "generation_config.json").unlink()
    with host_folder(str(tmp_path / "host")) as folder:
        await ready(folder, Service(tiny_dense))
        await asyncio.to_thread(fetched, WeightStore(tmp_path / "o", tiny_dense), folder, folder / MODEL, 1)
        assert not (await ready(folder, Service(other))).held
        assert digest_of(model_files(read_reference(folder / MODEL))) == digest_of(Service(other).files)
