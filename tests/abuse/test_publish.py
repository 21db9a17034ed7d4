"""Publication by trainers that come and go: unchecked content is never believed, ends no service and leaves nothing."""

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import dora
from dora.client import Operator
from dora.client.publication import canary_of, place_weights
from dora.errors import Conflict, InvalidValue
from dora.ops.cli.app import app
from dora.ops.stored_token import left_token, token_file
from dora.orchestrator.services import trainer as trainer_service
from dora.orchestrator.setup import run_folder_of
from dora.rpc import dora_pb2 as pb
from dora.weights.examining import examine_file
from dora.weights.files import WeightFile, hash_file, write_weights
from dora.weights.finite import FiniteCheck
from dora.weights.reference import TensorHeader, read_layout
from dora.weights.store import WeightStore
from tests.abuse.generated import hostile
from tests.private_token import with_token
from tests.refusals import data_words, refused
from tests.service import check_promises, configured, running, train, until
from tests.unit.test_runtime import Shell

NAME = "model.norm.weight"
NOT_FINITE = rf"weights: {NAME} = 'inf or NaN'"
GROUPS = 4


@pytest.fixture
def store(tmp_path: Path, tiny_dense: Path) -> WeightStore:
    return WeightStore(tmp_path / "store", tiny_dense)


@pytest.fixture
def tensors(tiny_dense: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = load_file(tiny_dense / "model.safetensors")
    return found


@pytest.fixture
def module(tiny_dense: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_dense, dtype=torch.float32)


# --------------------------------------------------------------------------------------------------- finite weights


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["module", "torch", "numpy", "file"])
def test_weights_that_are_not_finite_are_refused_by_name_on_every_path(
    form: str, value: float, store: WeightStore, tensors: dict[str, np.ndarray], module: Any, tmp_path: Path
) -> None:
    tensors[NAME][-1] = value
    with torch.no_grad():
        module.get_parameter(NAME)[-1] = value
    save_file(tensors, tmp_path / "bad.safetensors")
    weights = {
        "module": module,
        "numpy": tensors,
        "torch": {name: torch.from_numpy(tensor) for name, tensor in tensors.items()},
        "file": tmp_path / "bad.safetensors",
    }[form]
    folder = tmp_path / "out"
    with refused(InvalidValue, field="weights: model.norm.weight", value="inf or NaN", names=data_words(NOT_FINITE)):
        place_weights(weights, store.reference.tensors, folder)
    assert not folder.exists() or not list(folder.iterdir())


def test_the_store_itself_checks_what_any_client_brought(store: WeightStore, tensors: dict[str, np.ndarray]) -> None:
    tensors[NAME][0] = math.nan
    file = store.begin(1, 1) / "model.safetensors"
    save_file(tensors, file)
    with refused(InvalidValue, field="weights: model.norm.weight", value="inf or NaN", names=data_words(NOT_FINITE)):
        store.publish(1, 1, [hash_file(file)], None)
    assert store.versions() == (0,)


def test_a_number_that_overflows_by_conversion_is_not_finite(tmp_path: Path) -> None:
    expected = (TensorHeader("a", "F16", (3,)),)
    for weights in ({"a": np.array([1, 1e5, 2], np.float32)}, {"a": torch.tensor([1, 1e5, 2])}):
        with refused(InvalidValue, field="weights: a", value="inf or NaN", names=("F16",)):
            place_weights(weights, expected, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "finite", "infinite"),
    [
        ("F64", [0, 0x7FEF_FFFF_FFFF_FFFF, 1 << 63], [0x7FF0 << 48, 0xFFF8 << 48]),
        ("F32", [0, 0x7F7F_FFFF, 0x8000_0001], [0x7F80_0000, 0xFF80_0000, 0x7FC0_0000]),
        ("F16", [0, 0x7BFF, 0x8001], [0x7C00, 0xFC00, 0x7E00]),
        ("BF16", [0, 0x7F7F, 0x8001], [0x7F80, 0xFF80, 0x7FC0]),
        ("F8_E5M2", [0, 0x7B, 0x81], [0x7C, 0xFC, 0x7F]),
        ("F8_E4M3", [0, 0x7E, 0x81], [0x7F, 0xFF]),
        ("I32", [0, 0x7F80_0000, 0x7FC0_0000], []),
    ],
)
def test_bit_patterns(dtype: str, finite: list[int], infinite: list[int]) -> None:
    size = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}.get(dtype, 1)
    check, many = FiniteCheck(), 1 + FiniteCheck.CHUNK_BYTES // size  # the last one lies in a second chunk

    def content(last: int) -> memoryview:
        return memoryview(bytes(size * (many - 1)) + last.to_bytes(size, "little"))

    assert all(check.is_finite(content(bits), dtype) for bits in finite)
    assert not any(check.is_finite(content(bits), dtype) for bits in infinite)
    assert check.is_finite(memoryview(b""), dtype)


# ---------------------------------------------------------------------------------------------------- odd files


def framed(header: bytes, content: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + content


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
ODD = {
    "empty": b"",
    "short": b"\x01\x00",
    "huge length": framed(b"{}", length=(1 << 64) - 1),
    "length beyond the file": framed(b"{}", length=1 << 20),
    "no JSON": framed(b"{]"),
    "no object": framed(b"[1,2]"),
    "a number": framed(b"7"),
    "deep": framed(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "digits": framed(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
    "NaN": framed(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}'),
    "UTF-16": framed(json.dumps({}).encode("utf-16")),
    "byte-order mark": framed(b"\xef\xbb\xbf{}"),
    "twice": framed(b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", bytes(4)),
    "overlap": framed(b'{"a":' + ENTRY + b',"b":' + ENTRY + b"}", bytes(4)),
    "gap": framed(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)),
    "backwards": framed(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', bytes(4)),
    "more bytes": framed(b'{"a":' + ENTRY + b"}", bytes(5)),
    "fewer bytes": framed(b'{"a":' + ENTRY + b"}", bytes(3)),
    "negative": framed(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}'),
    "two negatives": framed(b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}', bytes(4)),
    "fractions": framed(b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', bytes(4)),
    "truth": framed(b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', bytes(4)),
    "texts": framed(b'{"a":{"dtype":"F32","shape":["1"],"data_offsets":["0","4"]}}', bytes(4)),
    "one offset": framed(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4]}}', bytes(4)),
    "no shape": framed(b'{"a":{"dtype":"F32","data_offsets":[0,4]}}', bytes(4)),
    "shape is a text": framed(b'{"a":{"dtype":"U8","shape":"1111","data_offsets":[0,1]}}', bytes(1)),
    "no dtype": framed(b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "entry is null": framed(b'{"a":null}'),
    "metadata": framed(b'{"__metadata__":{"a":1}}'),
    "metadata is a list": framed(b'{"__metadata__":[]}'),
    "a name of half a character": framed(b'{"\\ud800":' + ENTRY + b"}", bytes(4)),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_file_is_refused_with_a_reason(odd: str, store: WeightStore) -> None:
    file = store.begin(1, 1) / "model.safetensors"
    file.write_bytes(ODD[odd])
    with pytest.raises(InvalidValue) as refused:
        store.publish(1, 1, [hash_file(file)], None)
    str(refused.value).encode()  # it has to travel


def test_headers_that_are_broken_anyhow_are_refused_or_as_the_library_reads_them(tmp_path: Path) -> None:
    source, file = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.int8)}, source)
    content, chance = source.read_bytes(), random.Random(5)
    accepted = 0
    for _ in range(1000):
        broken = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(broken) - 16)
            broken[place] = chance.choice(b'{}[]",:0123456789-eE. \\\xff' + bytes([chance.randrange(256)]))
        file.write_bytes(broken)
        try:
            tensors = examine_file(file).by_name
        except InvalidValue:
            continue
        accepted += 1
        with safetensors.safe_open(file, "np") as library:  # a worker's engine would read it so
            assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
                name: library.get_slice(name).get_shape()
                for name in library.keys()  # noqa: SIM118 # no dictionary
            }
    assert 0 < accepted < 1000


def test_a_header_larger_than_the_model_explains_is_not_read(store: WeightStore) -> None:
    header = json.dumps({"__metadata__": {"a": "x" * (4 << 20)}}).encode()
    file = store.begin(1, 1) / "model.safetensors"
    file.write_bytes(framed(header))
    with refused(InvalidValue, field="model.safetensors: header bytes", value=4194331):
        store.publish(1, 1, [hash_file(file)], None)


def test_a_file_is_read_in_pieces_and_checked_in_one_pass(tmp_path: Path) -> None:
    headers = {"a": TensorHeader("a", "F32", (1 << 20,)), "b": TensorHeader("b", "I8", (3,))}
    tensors = {"a": np.ones(1 << 20, np.float32), "b": np.ones(3, np.int8)}
    written = write_weights(tmp_path / "a.safetensors", tensors, headers)
    found = examine_file(tmp_path / "a.safetensors")
    assert (found.identity, found.by_name) == (written, headers)
    assert hash_file(tmp_path / "a.safetensors") == written
    assert [tensor.name for tensor in read_layout(tmp_path / "a.safetensors")[1]] == ["a", "b"]


# -------------------------------------------------------------------------------------------------------- uploads


@pytest.fixture
async def shell(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Shell]:
    made = Shell(tmp_path, tiny_dense, None)
    await made.trainer.Attach(pb.AttachRequest(groups_per_step=1), None)
    yield made
    await made.runtime.close()


def upload_of(name: str, announced_bytes: int, *parts: bytes, version: int = 1, epoch: int = 1) -> Any:
    async def messages() -> AsyncIterator[pb.WeightChunk]:
        header = {"trainer_epoch": epoch, "version": version, "file_name": name, "file_bytes": announced_bytes}
        yield pb.WeightChunk(header=pb.WeightFileHeader(**header))
        for part in parts:
            yield pb.WeightChunk(content=part)

    return messages()


def held_bytes(shell: Shell) -> int:
    return sum(file.stat().st_size for file in (shell.store.root / "incoming").rglob("*") if file.is_file())


@pytest.mark.parametrize("version", [0, 2, 7, (1 << 64) - 1])
async def test_only_the_version_that_the_open_step_commits_is_taken(shell: Shell, version: int) -> None:
    with refused(Conflict, field="version", names=(version,)):
        await shell.trainer.UploadWeights(upload_of("a.safetensors", 4, b"abcd", version=version), None)
    assert not held_bytes(shell)


async def test_uploads_together_are_no_larger_than_the_model(shell: Shell) -> None:
    model_bytes = shell.store.reference.content_bytes
    with refused(InvalidValue, field="file_bytes", value=64130560, names=(model_bytes + (60 << 20),)):
        await shell.trainer.UploadWeights(upload_of("a.safetensors", model_bytes + (60 << 20), b"a"), None)
    with shell.store.upload(1, 1, "a.safetensors", model_bytes):  # on its way, not a byte there
        with refused(InvalidValue, field="file_bytes", value=2097152):
            await shell.trainer.UploadWeights(upload_of("b.safetensors", 2 << 20, b"b"), None)
        with refused(Conflict, field="file_name", value="a.safetensors"):
            await shell.trainer.UploadWeights(upload_of("a.safetensors", 4, b"abcd"), None)
    files = len(shell.store.reference.tensors)
    for number in range(files):
        await shell.trainer.UploadWeights(upload_of(f"{number}.safetensors", 1, b"a"), None)
    with refused(InvalidValue, field="file_name", value="more.safetensors", names=(files,)):
        await shell.trainer.UploadWeights(upload_of("more.safetensors", 1, b"a"), None)
    await shell.trainer.UploadWeights(upload_of("0.safetensors", 1, b"b"), None)  # in its own place
    assert held_bytes(shell) == files


async def test_an_upload_that_is_given_up_leaves_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_service, "UPLOAD_SILENCE_S", 0.0)

    async def silent() -> AsyncIterator[pb.WeightChunk]:
        async for message in upload_of("a.safetensors", 8, b"abcd"):
            yield message
        await asyncio.Event().wait()

    with refused(InvalidValue, field="upload", value="silent for 0 s"):
        await shell.trainer.UploadWeights(silent(), None)
    assert not held_bytes(shell)


async def test_the_upload_of_a_fenced_trainer_ends(shell: Shell) -> None:
    async def fenced() -> AsyncIterator[pb.WeightChunk]:
        async for message in upload_of("a.safetensors", 8, b"abcd"):
            yield message
        await shell.trainer.Attach(pb.AttachRequest(), None)
        yield pb.WeightChunk(content=b"efgh")

    with refused(Conflict, field="trainer_epoch", value=1):
        await shell.trainer.UploadWeights(fenced(), None)
    assert not held_bytes(shell)


def test_a_file_name_that_no_file_system_takes_is_refused(store: WeightStore) -> None:
    with refused(InvalidValue, field="weights: file name"):
        store.upload(1, 1, "\u00fc" * 190 + ".safetensors", 4)


# -------------------------------------------------------------------------------------------------------- metrics


async def filled(shell: Shell) -> pb.CommitStepRequest:
    """A step that waits for its commit."""
    shell.orders("")
    request = await shell.filled(trainer_epoch=2)
    request.trainer_epoch = 2
    os.rename(shell.store.begin(1, 1), shell.store.root / "incoming" / "2-1")
    return request


async def test_metrics_and_what_else_a_commit_says_are_bounded(shell: Shell) -> None:
    request = await filled(shell)
    for metrics, complaint in (
        ({f"m{number}": 0.0 for number in range(600_000)}, "600000 metrics"),
        ({"m" * 129: 0.0}, "1 to 128 characters"),
        ({"": 0.0}, "1 to 128 characters"),
        ({"a\nb": 0.0}, "printable"),
    ):
        bad = pb.CommitStepRequest(trainer_epoch=2, step=0, version=1, files=request.files, metrics=metrics)
        with refused(InvalidValue, names=data_words(complaint)):
            await shell.trainer.CommitStep(bad, None)
    bad = pb.CommitStepRequest(trainer_epoch=2, step=0, version=1, files=request.files)
    bad.files[0].blake3 = b"x"
    with refused(InvalidValue, field="model.safetensors: blake3", value="1 bytes", names=("32",)):
        await shell.trainer.CommitStep(bad, None)
    bad = pb.CommitStepRequest(trainer_epoch=2, step=0, version=1, files=[request.files[0]] * 100_000)
    with refused(InvalidValue, field="files", value="100000 files"):
        await shell.trainer.CommitStep(bad, None)
    ids, logprobs = np.zeros(1000, "<i4").tobytes(), np.zeros(999, "<f4").tobytes()
    bad = pb.CommitStepRequest(trainer_epoch=2, step=0, version=1, files=request.files)
    bad.canary.CopyFrom(pb.Canary(token_ids=ids, logprobs=logprobs))
    with refused(InvalidValue, field="canary.token_ids", value="1000 tokens"):
        await shell.trainer.CommitStep(bad, None)
    with refused(InvalidValue, field="client_name"):
        await shell.trainer.Attach(pb.AttachRequest(client_name="n" * 1000), None)
    request.metrics["loss"] = math.nan
    assert (await shell.trainer.CommitStep(request, None)).next_step == 1


# ------------------------------------------------------------------------------------- modules as trainers have them


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def wrapped(module: Any, wrapper: str) -> Any:
    parallel = torch.nn.parallel.DistributedDataParallel
    if wrapper == "compiled layers":
        module.model.layers[0] = torch.compile(module.model.layers[0])
        return module
    return {
        "compiled": lambda: torch.compile(module),
        "replicated": lambda: parallel(module),
        "compiled, replicated": lambda: parallel(torch.compile(module)),
        "replicated, compiled": lambda: torch.compile(parallel(module)),
        "averaged": lambda: torch.optim.swa_utils.AveragedModel(module),
    }[wrapper]()


@pytest.mark.parametrize(
    "wrapper",
    ["compiled", "compiled layers", "replicated", "compiled, replicated", "replicated, compiled", "averaged"],
)
def test_a_wrapped_module_is_published_as_the_module_in_it(
    wrapper: str, module: Any, store: WeightStore, one_rank: None, tmp_path: Path
) -> None:
    expected = store.reference.tensors
    plain, canary = place_weights(module, expected, tmp_path / "plain"), canary_of(module, expected)
    outer = wrapped(module, wrapper)
    assert place_weights(outer, expected, tmp_path / "wrapped") == plain
    state = {
        name: tensor for name, tensor in outer.state_dict().items() if "lm_head" not in name and name != "n_averaged"
    }
    assert place_weights(state, expected, tmp_path / "dict") == plain
    assert canary_of(outer, expected) == canary


# ------------------------------------------------------------------------------------------- coming, going, again


async def test_a_trainer_may_leave_a_loop_and_begin_another(tiny_dense: Path, tensors: dict[str, np.ndarray]) -> None:
    """And what operators see of it: who is there, who has left, and numbers that are none as JSON's null."""
    config = configured(tiny_dense, workers__engine="fake", workers__count=1)
    async with running(config) as handle, Operator(handle.address, handle.token) as operator:
        async with dora.Trainer(handle.address, token=handle.token, name="mine") as trainer:
            steps = await train(handle, trainer, steps=2, groups=GROUPS)
            async for step in trainer.steps():
                begun = [(await anext(step)).group_id]
                break
            again = await train(handle, trainer, steps=1, groups=GROUPS)
            assert begun[0] in {group.group_id for group in again[0]}
            steps += again
            async for step in trainer.steps(groups=GROUPS):
                steps.append([group async for group in step])
                with refused(
                    InvalidValue, field="weights: model.norm.weight", value="inf or NaN", names=data_words(NOT_FINITE)
                ):
                    await step.commit(weights={**tensors, NAME: np.full_like(tensors[NAME], np.nan)}, wait=True)
                with refused(InvalidValue, field="metrics: loss", value="low"):
                    await step.commit(weights=tensors, metrics={"loss": "low"}, wait=True)  # type: ignore[dict-item]
                await step.commit(weights=tensors, metrics={"loss": math.nan, "kl": torch.tensor(math.inf)}, wait=True)  # type: ignore[dict-item]
                break
            async for step in trainer.steps():
                await anext(step)  # it leaves with groups in its hands
                break
            assert (await operator.status()).trainer == "mine"
        check_promises(steps, window=2, groups=GROUPS)
        status = await until(operator, lambda status: not status.trainer)
        assert status.newest_version == 4
        for command in (["status", "--json"], ["watch", "--json", "--updates", "1"]):
            result = await asyncio.to_thread(
                CliRunner().invoke,
                app,
                [*command, "--address", handle.address, "--token-file", with_token(handle.token)],
            )
            tree = json.loads(result.stdout, parse_constant=pytest.fail)
            assert tree["steps"][-1]["metrics"] == {"kl": None, "loss": None} and tree["trainer"] == ""


async def test_a_run_folder_is_used_again(tiny_dense: Path, tmp_path: Path) -> None:
    """Its versions are of a service that has ended: the next one begins with its own, and none shares it."""
    folder = tmp_path / "run"
    config = configured(tiny_dense, workers__engine="fake", workers__count=1, service__run_folder=str(folder))
    for _ in range(2):
        async with running(config) as handle, dora.Trainer(handle.address, token=handle.token) as trainer:
            await train(handle, trainer, steps=1, groups=GROUPS)
            assert (folder / "weights" / "versions" / "1").is_dir()
            with refused(InvalidValue, field="service.run_folder"), run_folder_of(config):
                pass


def test_a_folder_with_somebodys_weights_is_left_alone(tiny_dense: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mine.safetensors").write_bytes(b"dear")
    with (
        refused(InvalidValue, field="service.run_folder"),
        run_folder_of(configured(tiny_dense, service__run_folder=str(tmp_path))),
    ):
        pass
    assert (tmp_path / "weights" / "mine.safetensors").read_bytes() == b"dear"


CHILD = """
import sys
from dora.ops.stored_token import left_token
from dora.config import load_config
from dora.orchestrator.setup import run_folder_of
with run_folder_of(load_config()) as folder, left_token("127.0.0.1:1", "secret"):
    (folder / "weights").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_service_left_is_swept_by_the_next(
    tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    argv = [sys.executable, "-c", CHILD]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        with run_folder_of(configured(tiny_dense)) as folder, left_token("127.0.0.1:2", "mine"):
            assert left.is_dir() and folder.is_dir() and token_file("127.0.0.1:1").is_file(), "its service lives"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert left.is_dir() and token_file("127.0.0.1:1").is_file()
    with run_folder_of(configured(tiny_dense)) as folder, left_token("127.0.0.1:2", "mine"):
        assert not left.exists() and not token_file("127.0.0.1:1").exists()
        assert folder.is_dir() and token_file("127.0.0.1:2").is_file()
    assert not folder.exists() and not token_file("127.0.0.1:2").exists()


def test_an_announced_file_is_what_it_was_announced_as(store: WeightStore, tensors: dict[str, np.ndarray]) -> None:
    file = store.begin(1, 1) / "model.safetensors"
    save_file(tensors, file)
    found = hash_file(file)
    with refused(
        InvalidValue,
        field="model.safetensors: blake3",
        value="15246521a01ce75943f828c72a2d49f372ffd9aba29d0eebc019a0ea61159c4f",
    ):
        store.publish(1, 1, [WeightFile(file.name, found.file_bytes, bytes(32))], None)
    os.truncate(file, found.file_bytes - 1)
    with refused(InvalidValue, field="model.safetensors: bytes of tensors", value=1215999):
        store.publish(1, 1, [found], None)


async def test_generated_messages_of_a_trainer_end_nothing(shell: Shell) -> None:
    """Whatever comes on any of its calls is answered, or refused with a reason that can travel."""
    chance = random.Random(7)
    await filled(shell)
    refused = answered = 0

    async def chunks() -> AsyncIterator[pb.WeightChunk]:
        for _ in range(chance.randint(0, 3)):
            yield hostile(pb.WeightChunk, chance, known)

    async def of_stream(stream: Any) -> None:
        async for _ in stream:
            break
        await stream.aclose()

    known: dict[str, Any] = {
        "step": (0, 0, 1),
        "version": (1, 1, 0),
        "file_name": ("a.safetensors",),
        "name": ("a.safetensors",),
        "file_bytes": (4,),
        "groups_per_step": (0, 1),
        "client_name": ("mine",),
        "blake3": (bytes(32),),
    }
    calls = (
        lambda: shell.trainer.Attach(hostile(pb.AttachRequest, chance, known), None),
        lambda: shell.trainer.CommitStep(hostile(pb.CommitStepRequest, chance, known), None),
        lambda: shell.trainer.UploadWeights(chunks(), None),
        lambda: of_stream(shell.trainer.StreamStep(hostile(pb.StreamStepRequest, chance, known), None)),
        lambda: of_stream(shell.trainer.KeepAlive(hostile(pb.KeepAliveRequest, chance, known), None)),
    )
    for _ in range(3000):
        known["trainer_epoch"] = (shell.trainer._epoch,)
        try:
            async with asyncio.timeout(30):
                await chance.choice(calls)()
            answered += 1
        except InvalidValue as error:
            str(error).encode()
            refused += 1
        assert not shell.runtime.failed.done()
    assert answered > 300 and refused > 300
    assert held_bytes(shell) <= shell.store.reference.content_bytes + (2 << 20)
    assert shell.store.versions() == (0,) and not list((shell.store.root / "versions").glob(".*"))


def test_a_pipe_or_a_device_is_no_weights_file(store: WeightStore, tmp_path: Path) -> None:
    """A pipe without a writer would be waited for, and a device read, for ever."""
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").symlink_to("/dev/zero")
    for name in ("a.safetensors", "b.safetensors"):
        with refused(InvalidValue, field="weights file"):
            place_weights(tmp_path / name, store.reference.tensors, tmp_path / "out")
        with refused(InvalidValue, field="weights file"):
            hash_file(tmp_path / name)
