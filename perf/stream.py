"""The stream to the trainer: how many trajectories a second go from the book into arrays, beside TransferQueue's.

    python perf/stream.py --json
    python perf/stream.py --no-peer --rounds 5

Finished responses lie in a real book in a process of its own. The service's code leases, packs and sends them; a
``dora.Trainer`` over loopback takes each group and asks for its tokens and logprobs as arrays of its own.

trajectories_per_s             the best of --rounds steps, from asking for the first group to the arrays of the last
service_us, client_us          CPU time of both processes a trajectory, of that step
unpacked_per_s, objects_per_s  the same in the readable form of the wire; packed, with every Trajectory made
peer                           TransferQueue's, in the same run: perf/stream_peer.py says what is measured
vs_transfer_queue              trajectories_per_s by the better of what the peer's reader gets: of what is there
                               already, as it is here, or while it is put

The peer needs a virtual environment of its own, which is made in --peer-venv if it is not there (1.4 GB: it pulls ray).
Where that cannot be done, "peer" says why.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from dora.client import Trainer
from dora.client.step import Step
from dora.config import RolloutConfig
from dora.data.token_spans import TokenColumns
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Prompt, Reward
from dora.errors import Conflict
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.channel import server_options
from dora.rpc.interceptor import server_interceptors
from dora.rpc.packed import packed_batches
from dora.rpc.roles import ServiceTokens
from dora.rpc.secure import server_credentials
from dora.tls import Tls

TOKEN: Final = hashlib.blake2b(b"of this run", digest_size=32).hexdigest()  # both processes have it
GROUP_SIZE: Final = 8
PEER: Final = "transferqueue==0.1.11"
PEER_VENV: Final = Path(__file__).parents[1] / ".cache" / "transfer-queue"
PEER_S: Final = 900.0  # it may take so long to be installed, and to run


def main() -> None:
    if sys.argv[1:2] == ["service"]:
        asyncio.run(be_service(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=4096, help="of a step")
    parser.add_argument("--tokens", type=int, default=2048, help="of each, of 8 bytes")
    parser.add_argument("--rounds", type=int, default=5, help="steps, of which the best counts")
    parser.add_argument("--peer-venv", type=Path, default=PEER_VENV, help="where TransferQueue is, or is installed")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measured(options))
    found["peer"] = None if options.no_peer else peer(options)
    rates = [value for name, value in (found["peer"] or {}).items() if name.endswith("get_per_s")]
    found["vs_transfer_queue"] = found["trajectories_per_s"] / max(rates) if rates else None
    print(json.dumps(found) if options.json else "\n".join(f"{name:24} {value}" for name, value in found.items()))


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All that is measured of DORA."""
    async with served(options) as service, Trainer(service.address, token=TOKEN) as trainer:
        packed = await best(service, trainer, options, arrays)
        objects = await best(service, trainer, options, each_trajectory)
        await service.ask("unpacked")
        unpacked = await best(service, trainer, options, arrays)
    return {
        "trajectories": options.trajectories,
        "trajectory_bytes": 8 * options.tokens,
        **packed,
        "mb_per_s": packed["trajectories_per_s"] * 8 * options.tokens / 1e6,
        "objects_per_s": objects["trajectories_per_s"],
        "unpacked_per_s": unpacked["trajectories_per_s"],
    }


async def best(service: "Service", trainer: Trainer, options: argparse.Namespace, taken: Any) -> dict[str, float]:
    """The fastest of so many steps, which hold the same groups: none is committed."""
    rounds = []
    for _ in range(options.rounds + 1):
        step: Step = await anext(trainer.steps(groups=options.trajectories // GROUP_SIZE))
        before, began_s, began_cpu_s = await service.ask("mark"), time.monotonic(), time.process_time()
        trajectories = 0
        async for group in step:
            trajectories += taken(group, options.tokens)
        took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        after = await service.ask("mark")
        assert trajectories == options.trajectories
        rounds.append(
            {
                "trajectories_per_s": trajectories / took_s,
                "service_us": (after["cpu_s"] - before["cpu_s"]) * 1e6 / trajectories,
                "client_us": took_cpu_s * 1e6 / trajectories,
            }
        )
    return max(rounds[1:], key=lambda each: each["trajectories_per_s"])  # the first is for what is made once


def arrays(group: TrajectoryGroup, tokens: int) -> int:
    """Reads the fields of a group that every trainer reads."""
    found = group.tokens(), group.logprobs()
    assert all(each.shape == (GROUP_SIZE, tokens) and each.flags.writeable for each in found)
    return len(group)


def each_trajectory(group: TrajectoryGroup, tokens: int) -> int:
    """Every field of every response."""
    assert all(each.length_tokens == tokens for each in group.trajectories)
    return len(group)


# ------------------------------------------------------------------------------------------------------------- service


class Service:
    """The service's process, which is asked in lines and answers in JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.address = ""

    async def ask(self, question: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n".encode())
        return await self.hear()

    async def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("the service has ended")
        told: dict[str, Any] = json.loads(line)
        return told


@contextlib.asynccontextmanager
async def served(options: argparse.Namespace, tls: Path | None = None) -> AsyncIterator[Service]:
    """``tls``: the folder of the service's certificate, for mutual TLS."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, __file__, "service", str(options.trajectories), str(options.tokens))
    command += (str(tls),) if tls is not None else ()
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    service = Service(process)
    try:
        service.address = (await service.hear())["address"]
        yield service
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def be_service(trajectories: int, tokens: int, tls: str = "") -> None:
    servicer = StepService(trajectories, tokens)
    server = grpc.aio.server(interceptors=server_interceptors(ServiceTokens(TOKEN)), options=server_options())
    stubs.add_TrainerServicer_to_server(servicer, server)
    if tls:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(Tls.of_folder(tls), mutual=True))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        servicer.packs = servicer.packs and line.strip() != b"unpacked"
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)
    await server.stop(grace=None)


class StepService(stubs.TrainerServicer):
    """Streams the one step there is, as often as it is asked for: out of the book anew each time."""

    def __init__(self, trajectories: int, tokens: int) -> None:
        self._buffer = ResponseBuffer(RolloutConfig(max_tokens=tokens))
        self._groups = trajectories // GROUP_SIZE
        self._epoch = 0
        self.packs = True
        rng = np.random.default_rng(0)
        for group in range(self._groups):
            rows = {f"g{group}.{index}": group * GROUP_SIZE + index for index in range(GROUP_SIZE)}
            prompt = Prompt(f"p{group}", "task", tuple(range(3, 67)), group_size=GROUP_SIZE)
            self._buffer.admit(f"g{group}", prompt, 0, rows, time.time())
            columns = finished(np.array(list(rows.values())), tokens, rng)
            self._buffer.accept("w0", 0, columns, time.time())
            for request_id in rows:
                self._buffer[request_id].reward = Reward(1.0)

    async def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachReply:
        self._epoch += 1
        return pb.AttachReply(trainer_epoch=self._epoch, groups_per_step=self._groups, window_versions=1)

    async def StreamStep(
        self, request: pb.StreamStepRequest, context: Any
    ) -> AsyncIterator[pb.TrajectoryBatch | bytes]:
        if request.step:
            raise Conflict("step", request.step, "0")
        batches = packed_batches if request.packed and self.packs else convert.trajectory_batches
        for message in batches(request.step, self._delivered(request.step)):
            yield message

    def _delivered(self, step: int) -> Iterator[TrajectoryGroup]:
        for group_id, entries in self._buffer.groups():
            assert entries[0].group_id == group_id
            yield self._buffer.group_of(entries, step)


def finished(rows: Any, tokens: int, rng: np.random.Generator) -> TokenColumns:
    """A report in which all of these rows' tokens come at once."""
    counts, nothing = np.full(len(rows), tokens), np.zeros(len(rows), np.int64)
    return TokenColumns(
        rows=rows,
        first_tokens=nothing,
        counts=counts,
        ends=np.full(len(rows), 2, np.uint8),
        begins=np.cumsum(counts) - counts,
        token_ids=rng.integers(3, 50_000, len(rows) * tokens, dtype=np.int32),
        logprobs=-rng.random(len(rows) * tokens, dtype=np.float32),
        stops={},
        routed_begins=nothing,
        routed_bytes=nothing,
        routed_experts=memoryview(b""),
    )


# ---------------------------------------------------------------------------------------------------------------- peer


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """TransferQueue's rates; {"missing": why} where there is none."""
    python = options.peer_venv / "bin" / "python"
    script = Path(__file__).with_name("stream_peer.py")
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", options.peer_venv], check=True, capture_output=True)
            install = [python, "-m", "pip", "install", "--quiet", PEER]
            subprocess.run(install, check=True, capture_output=True, timeout=PEER_S)
        batches = str(max(1, options.trajectories // 128))
        command = [python, script, "--tokens", str(options.tokens), "--batch", "128", "--batches", batches]
        told = subprocess.run(command, check=True, capture_output=True, timeout=PEER_S, text=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        return {"missing": said[-1] if said else type(error).__name__}
    found: dict[str, Any] = json.loads(told.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
