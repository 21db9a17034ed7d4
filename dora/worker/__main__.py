"""``python -m dora.worker``: one rollout worker with one engine. The service starts it, or an operator does on any
host.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Final

from dora.errors import DoraError
from dora.host.command import WORKER_MODULE
from dora.kvtransfer.plane import DataPlane, local_host
from dora.rpc import dora_pb2 as pb
from dora.session.guarded import check_credentials
from dora.session.link import SessionLink
from dora.session.linked import Address, LinkedMember
from dora.system.environment import taken
from dora.system.interfaces import restrict_groups
from dora.system.numa import bind
from dora.system.private import PRIVATE_UMASK
from dora.system.signals import ignore_notices, stop_on_signals
from dora.tls.options import add_options, tls_of
from dora.worker.engine import RolloutEngine
from dora.worker.loop import EngineLoop, of_store
from dora.worker.vllm.device.choice import device_named
from dora.worker.vllm.device.port import KINDS

log = logging.getLogger("dora.worker")

SWITCH_S: Final = 0.5e-3
FULL_PRECISION: Final = "--full-precision"


class WorkerMember(LinkedMember):
    """A worker as a member of the service. It continues to generate without a service."""

    def __init__(self, address: Address, engine: RolloutEngine, stop: threading.Event) -> None:
        super().__init__(address, engine.capability, engine.capability.fingerprint, stop)
        self._engine = engine
        self._loop: EngineLoop | None = None

    def held(self) -> pb.WorkerHello:
        return pb.WorkerHello() if self._loop is None else self._loop.held()

    def loop_of(self, link: SessionLink, welcome: pb.Welcome, plane: DataPlane) -> EngineLoop:
        versions = of_store(Path(welcome.weights_folder), self._address.name)
        if self._loop is None:
            self._loop = EngineLoop(self._engine, link, welcome, plane, versions=versions)
        else:
            self._loop.come_back(link, welcome, plane, versions)
        return self._loop

    def step_alone(self) -> bool:
        return self._loop is not None and self._loop.step_alone()

    @property
    def last_order(self) -> pb.Shutdown:
        """The order that has ended it; an empty one if there was none."""
        return pb.Shutdown() if self._loop is None else self._loop.last_order


def main(argv: list[str] | None = None) -> int:
    ignore_notices()
    gc.disable()  # imported modules are permanent: collecting them again and again costs 12 to 25% of the time
    bound = bind()  # before threads and ranks, which inherit it
    if sys.argv[1:] == ["--wait"]:
        argv = _arguments_from_stdin("cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu")
    options = _parser().parse_args(argv)
    if options.full_precision:
        options.quantisation = options.kv_dtype = ""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options.worker_id} %(levelname)s %(message)s")
    if bound:
        log.info("%s", bound)
    token = taken("DORA_TOKEN")  # its own children, such as the ranks of an engine, need none
    try:
        tls = tls_of(options)
        check_credentials(token, tls)
        restrict_groups(options.kv_host or local_host(options.orchestrator))
        engine = make_engine(options)
    except DoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    gc.freeze()
    gc.enable()
    # The data plane's threads release the interpreter for each copy, and want it back while the engine runs: with
    # Python's 5 ms a copy beside busy Python took twice as long.
    sys.setswitchinterval(SWITCH_S)
    stop = threading.Event()
    stop_on_signals(stop.set)
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(engine.close)
            address = Address(
                options.orchestrator, token, options.worker_id, options.kv_host, options.host, options.host_folder, tls
            )
            member = WorkerMember(address, engine, stop)
            stack.callback(member.close)
            member.serve()
            order = member.last_order
    except DoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    if order.starts_again:
        _start_again(argv if argv is not None else sys.argv[1:], token, full_precision=order.full_precision)
    return 0


def _start_again(argv: list[str], token: str, *, full_precision: bool) -> None:
    """Replaces this process by one with an engine of the other precision. Its launcher keeps the process that it knows.

    vLLM fixes quantisation as it builds a model, and the KV-cache's dtype as it allocates it.
    """
    argv = [each for each in argv if each != FULL_PRECISION] + [FULL_PRECISION] * full_precision
    log.info("the engine starts again in %s precision", "full" if full_precision else "the configured")
    logging.shutdown()
    os.environ["DORA_TOKEN"] = token  # this worker's own, which it took out at its start
    os.execv(sys.executable, [sys.executable, "-m", WORKER_MODULE, *argv])


def _arguments_from_stdin(device: str) -> list[str]:
    """Imports vLLM for a kind of device, which takes seconds, then reads the arguments from stdin: a line of JSON.

    Ends the process if stdin ends first, because the service has ended.
    """
    from dora.worker.vllm import environment as vllm_environment

    vllm_environment.prepare(device_named(device).environment)
    from dora.worker.vllm import weights as vllm_weights  # noqa: F401

    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    command: list[str] = json.loads(line)
    return command[2:]  # without -m and the module


def make_engine(options: argparse.Namespace) -> RolloutEngine:
    """Returns the engine of this name; vLLM is imported only here."""
    if options.engine == "fake":
        from dora.worker.fake.engine import FakeEngine

        return FakeEngine(
            slots=options.slots,
            kv_tokens=options.kv_tokens,
            block_tokens=options.block_tokens,
            max_model_len_tokens=options.max_model_len_tokens,
            model=Path(options.model),
            router_replay=options.router_replay,
            full_precision=options.full_precision,
        )
    from dora.worker.vllm.device.port import EngineSettings
    from dora.worker.vllm.engine import VllmEngine

    return VllmEngine(
        Path(options.model),
        EngineSettings(
            slots=options.slots,
            kv_tokens=options.kv_tokens,
            block_tokens=options.block_tokens,
            max_model_len_tokens=options.max_model_len_tokens,
            dtype=options.dtype,
            tensor_parallel=options.tensor_parallel,
            pipeline_parallel=options.pipeline_parallel,
            quantisation=options.quantisation,
            kv_dtype=options.kv_dtype,
            full_precision=options.full_precision,
            memory_share=options.gpu_memory_utilisation,
            batch_invariant=options.batch_invariant,
            state_bytes=options.state_mb << 20,
            speculation=options.speculation,
            history_bytes=options.history_mb * 10**6,
            engine_args=options.engine_args,
        ),
        tier_endpoint=options.kv_tier,
        router_replay=options.router_replay,
        device=options.device,
        load_timeout_s=options.load_timeout_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dora.worker", description=__doc__)
    parser.add_argument("--orchestrator", required=True, help="the service's host:port")
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--host", default="", help="name of its host; empty: the system's")
    parser.add_argument(
        "--host-folder", default="", help="with its host's weights and shared memory; empty: the service's"
    )
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm")
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--slots", type=int, default=16, help="requests decoded at once")
    parser.add_argument("--device", choices=KINDS, default="cpu", help="kind of device")
    parser.add_argument("--state-mb", type=int, default=1024, help="host memory of states that sessions may return to")
    parser.add_argument(
        "--gpu-memory-utilisation", type=float, default=0.9, help="of a GPU's memory, for everything together"
    )
    parser.add_argument("--load-timeout-s", type=float, default=60.0, help="of a version's load; longer if it is large")
    parser.add_argument("--kv-tokens", type=int, default=32768, help="KV-cache, in tokens; 0: as many as fit")
    parser.add_argument("--block-tokens", type=int, default=32, help="0: the attention backend's own")
    parser.add_argument("--max-model-len-tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the device's")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share each layer, each a process")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="stages, each of so many ranks")
    parser.add_argument("--quantisation", choices=("int8", "fp8"), default="", help="of projections; none by default")
    parser.add_argument("--kv-dtype", default="", help="of KV, one of vLLM's; default: --dtype")
    parser.add_argument(FULL_PRECISION, action="store_true", help="without --quantisation and --kv-dtype")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="vLLM's own arguments: an object of JSON")
    parser.add_argument("--batch-invariant", action="store_true", help="on GPUs: logits independent of neighbours")
    parser.add_argument("--speculation", default="", help="drafts: history, ngram or model:DIR; default: none")
    parser.add_argument("--history-mb", type=int, default=64, help="history, or KV of a draft model")
    parser.add_argument("--router-replay", action="store_true", help="report the experts of each token")
    parser.add_argument("--kv-host", default="", help="address at which other workers reach this one with KV")
    add_options(parser)
    parser.add_argument("--kv-tier", default="", help="address of the service's shared KV tier; empty: none")
    return parser


if __name__ == "__main__":
    os.umask(PRIVATE_UMASK)
    sys.exit(main())
