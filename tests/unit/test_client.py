"""Parts of the client that need no service: patience, weights in all their forms, and what importing it loads."""

import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from dora.client.connection import CALLS_EACH, Connection, Connections, Patience
from dora.client.publication import canary_of, place_weights, weight_paths
from dora.client.session import attachment_of
from dora.client.trainer import Trainer
from dora.errors import Conflict, InvalidValue
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.weights.reference import TensorHeader, read_header
from tests.refusals import data_words, refused

EXPECTED = (TensorHeader("a", "F32", (2, 3)), TensorHeader("head", "F32", (3,), optional=True))


def test_importing_the_client_loads_no_torch() -> None:
    check = "import sys, dora; dora.Trainer; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_patience_grows_and_ends_and_starts_anew_with_progress() -> None:
    patience = Patience(total_s=10.0, first_s=1.0, longest_s=4.0)
    lost = ServiceUnavailable("gone")
    now_s, waits_s = 100.0, []
    with refused(ServiceUnavailable, names=("10",)):
        while True:
            waits_s.append(patience.next_wait_s(now_s, lost))
            now_s += waits_s[-1]
    assert waits_s == [1.0, 2.0, 4.0]  # the next would end after 11 s
    patience.progress()
    assert patience.next_wait_s(now_s, lost) == 1.0


def test_calls_are_spread_over_connections_and_use_them_again() -> None:
    connections = Connections(Connection("127.0.0.1:1", "a token"))
    with ExitStack() as calls:
        held = [calls.enter_context(connections.for_a_call()) for _ in range(2 * CALLS_EACH + 1)]
        assert sorted(Counter(held).values()) == [1, CALLS_EACH, CALLS_EACH]
    with connections.for_a_call() as again:
        assert again in held


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_tensors_are_cast_to_what_is_expected(kind: str, tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float64).reshape(2, 3)
    weights = {"a": torch.from_numpy(values) if kind == "torch" else values}
    (file,) = place_weights(weights, EXPECTED, tmp_path)
    assert read_header(tmp_path / file.name) == {"a": TensorHeader("a", "F32", (2, 3))}


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ({"a": np.zeros((3, 2), np.float32)}, r"weights: a: shape = \[3, 2\] .*\[2, 3\]"),
        ({"a": np.zeros((2, 3), np.int32)}, "weights: a: dtype = 'I32' .*F32"),
        ({"a": np.zeros((2, 3), np.complex64)}, "weights: a: dtype = 'complex64'"),
        ({"b": np.zeros((2, 3), np.float32)}, "weights: a is missing: it must be present"),
        ({"a": [1, 2]}, "weights: a = 'list'"),
        ({}, "weights = 'dict'"),
    ],
)
def test_weights_that_do_not_fit_write_nothing(weights: object, complaint: str, tmp_path: Path) -> None:
    with refused(InvalidValue, names=data_words(complaint)):
        place_weights(weights, EXPECTED, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_files_and_folders_are_placed_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "source"
    written = place_weights({"a": np.ones((2, 3), np.float32)}, EXPECTED, source)
    for weights in (source, str(source / "model.safetensors"), [source / "model.safetensors"]):
        assert place_weights(weights, EXPECTED, tmp_path / "out") == written
    with refused(InvalidValue, field="weights file"):
        place_weights(tmp_path / "none.safetensors", EXPECTED, tmp_path / "out")
    with refused(InvalidValue, field="weights"):
        weight_paths([tmp_path / "a" / "x.safetensors", tmp_path / "b" / "x.safetensors"])
    with refused(InvalidValue, field="weights: file name", value="weights.pt"):
        weight_paths(tmp_path / "weights.pt")


@pytest.mark.parametrize("name", ["gone", "gone/0", "model.safetensors/0", "v1.0", "step-3", ".hidden", "gone/"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_that_is_not_there_is_called_that(name: str, kind: type[str | Path], tmp_path: Path) -> None:
    with refused(InvalidValue, field="weights", value=str(tmp_path / name), names=("no such folder",)):
        place_weights(kind(f"{tmp_path}/{name}"), EXPECTED, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_weights_is_named_as_weights(tmp_path: Path) -> None:
    with refused(InvalidValue, field="weights", value=str(tmp_path), names=("a folder with safetensors files",)):
        place_weights(tmp_path, EXPECTED, tmp_path / "out")


def test_a_module_without_a_config_cannot_make_a_canary() -> None:
    with refused(InvalidValue, field="weights", value="Linear", names=("config.vocab_size",)):
        canary_of(torch.nn.Linear(2, 2), ())
    assert canary_of({"a": np.zeros(1)}, ()) is None


def test_a_shared_host_is_proved_not_assumed(tmp_path: Path) -> None:
    (tmp_path / "incoming").mkdir()
    (tmp_path / "proof").write_bytes(b"secret")
    reply = {"store_folder": str(tmp_path), "store_proof": str(tmp_path / "proof")}
    assert attachment_of(pb.AttachReply(**reply, store_proof_bytes=b"secret")).store_folder == tmp_path
    for proof in (b"other!", b"secre", b"secret and more", b""):
        assert attachment_of(pb.AttachReply(**reply, store_proof_bytes=proof)).store_folder is None
    (tmp_path / "proof").unlink()
    assert attachment_of(pb.AttachReply(**reply, store_proof_bytes=b"secret")).store_folder is None


def test_misuse_is_named() -> None:
    trainer = Trainer("127.0.0.1:7070", token="t")
    with refused(Conflict, field="trainer", value="trainer"):
        _ = trainer.stub
    with refused(Conflict, field="trainer", value="trainer"):
        _ = trainer.attachment
    with refused(InvalidValue, field="token", value="(not shown)"):
        Trainer("127.0.0.1:7070", token="a\nb")
