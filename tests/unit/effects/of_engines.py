"""The settings of workers, sampling and the movement of KV, as the processes, engines and planes have them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final

from dora.config import Config
from dora.data.types import Prompt, RequestSpec, SamplingParams
from dora.errors import InvalidValue
from dora.host import launchers
from dora.host.command import LaunchContext, pool_id_of, worker_argv
from dora.host.launcher import LOCAL
from dora.host.placement import placement_of
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.plane import local_host
from dora.orchestrator.recording.storage import Storage
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.starting import ServiceStart
from dora.rpc.roles import ServiceTokens
from dora.worker import __main__ as worker_process
from dora.worker.engine import RolloutEngine
from tests.unit.effects.rows import Place, Row, Seen, Shown

FAKE: Final = {"workers.engine": "fake", "workers.kv_tokens": 512, "workers.max_model_len_tokens": 512}
PROMPT: Final = Prompt("p0", "task", (5, 6, 7), group_size=1)

# ----------------------------------------------------------------------------------------------------------- the start


class Noted:
    """A launcher that starts nothing: what the service asks it for."""

    def __init__(
        self,
        _config: object,
        command: Callable[[str], list[str]],
        environment: Callable[[str], Mapping[str, str]],
        _folder: Path,
        _unwritable: object,
        pools: Sequence[str],
        **_more: object,
    ) -> None:
        self.command, self.environment, self.pools = command, environment, pools
        self.begun = 0

    def adopt(self, _living: object, _workers: int) -> None: ...

    async def begin(self, workers: int) -> None:
        self.begun = workers

    async def close(self) -> None: ...


async def launched(config: Config, place: Place) -> Noted:
    """The launcher of a service that starts with this configuration."""
    point = EntryPoint("noted", f"{__name__}:Noted", launchers.GROUP)
    place.monkeypatch.setattr(launchers, "entry_points", lambda group: [point])
    config = config.model_copy(update={"workers": config.workers.model_copy(update={"launcher": "noted"})})
    async with contextlib.AsyncExitStack() as stack:
        start = ServiceStart(config, ServiceTokens(), None, place.folder, Storage(), None, stack, lambda line: None, 0)
        start.address, start.model = "127.0.0.1:1", Path("model")
        launcher = await start.launch()
        assert isinstance(launcher, Noted)
        return launcher


def argument(option: str, name: str = "w0") -> Callable[[Config, Place], Any]:
    """Observes an argument of the worker's process."""

    async def see(config: Config, place: Place) -> str:
        argv = (await launched(config, place)).command(name)
        return argv[argv.index(option) + 1] if option in argv else ""

    return see


async def begun(config: Config, place: Place) -> int:
    return (await launched(config, place)).begun


async def pools(config: Config, place: Place) -> Sequence[str]:
    return (await launched(config, place)).pools


async def threads(config: Config, place: Place) -> str:
    return (await launched(config, place)).environment("w0")["OMP_NUM_THREADS"]


def devices(config: Config, _: Place) -> object:
    """Returns the devices of workers on a machine without GPUs; or the refusal."""
    try:
        return placement_of(config.workers.device, for_trainer=config.workers.gpus_for_trainer).kind
    except InvalidValue as error:
        return error.field


async def listens(config: Config, place: Place) -> str:
    """The address at which a worker is reached by others."""
    argv = (await launched(config, place)).command("w0")
    options = worker_process._parser().parse_args(argv[2:])
    listener = Listener(options.kv_host or local_host(options.orchestrator))
    listener.close()
    return listener.address.rpartition(":")[0]


POOL: Final = pool_id_of(LOCAL)

# --------------------------------------------------------------------------------------------------------- the engine


@contextlib.contextmanager
def engine_of(config: Config, model: Path) -> Iterator[RolloutEngine]:
    """The engine of a worker, as its process makes it of its arguments."""
    argv = worker_argv(config.workers, "w0", LaunchContext("127.0.0.1:1", model))
    with contextlib.closing(worker_process.make_engine(worker_process._parser().parse_args(argv[2:]))) as engine:
        engine.load_weights(0, model, None)
        yield engine


def capability(field: str) -> Callable[[Config, Place], int]:
    def see(config: Config, place: Place) -> int:
        with engine_of(config, place.model("dense")) as engine:
            return int(getattr(engine.capability, field))

    return see


def sampling_of(config: Config) -> SamplingParams:
    """Those of the request that a worker gets."""
    prompt = PromptCheck(config).checked(PROMPT)
    (entry,) = ResponseBuffer(config.rollout, None, 2).begin("g0", prompt, 0, {"g0.0": 0}, 0.0)
    return entry.sampling


def generated(config: Config, place: Place, model: str = "dense") -> list[int]:
    """The tokens of a response; of a mixture, its experts."""
    with engine_of(config, place.model(model)) as engine:
        engine.add(RequestSpec("g0.0", 0, PROMPT.token_ids, sampling_of(config)))
        deltas = []
        while engine.has_work():
            deltas += engine.step()
    if model == "moe":
        return [len(each.routed_experts) for each in deltas]
    return [token for each in deltas for token in each.token_ids]


def routed(config: Config, place: Place) -> bool:
    return sum(generated(config, place, "moe")) > 0


def length(config: Config, place: Place) -> int:
    return len(generated(config, place))


def responses(config: Config, _: Place) -> int:
    return PromptCheck(config).checked(Prompt("p0", "task", (1,))).group_size


def responses_at_once(config: Config, _: Place) -> int:
    return PromptCheck(config).checked(Prompt("p0", "task", (1,))).group_size_min


def sampled(field: str) -> Callable[[Config, Place], Any]:
    """Observes one of vLLM's sampling parameters."""

    def see(config: Config, _: Place) -> object:
        from dora.worker.vllm.requests import to_vllm  # here: it takes seconds

        request = RequestSpec("g0.0", 0, PROMPT.token_ids, sampling_of(config))
        return getattr(to_vllm(request, "e", (2,)).sampling_params, field)

    return see


def sampled_with(field: str) -> Callable[[Config, Place], Any]:
    """Observes one parameter of the request to the worker's engine."""
    return lambda config, _: getattr(sampling_of(config), field)


def vllm_argument(field: str) -> Callable[[Config, Place], Any]:
    """An argument with which a worker's process makes its engine."""

    def see(config: Config, place: Place) -> object:
        from dora.worker.vllm import core as vllm_core  # here: it takes seconds

        seen: list[Any] = []

        def start(model: Path, settings: Any, device: Any, make_drafter: Any) -> Any:
            seen.append(getattr(vllm_core.arguments(model, settings, device), field))
            raise InvalidValue("engine", "", "started")

        place.monkeypatch.setattr(vllm_core, "start", start)
        place.monkeypatch.setenv("OMP_NUM_THREADS", "1")
        argv = worker_argv(config.workers, "w0", LaunchContext("127.0.0.1:1", place.model("dense"), device=DEVICE))
        with contextlib.suppress(InvalidValue):
            worker_process.make_engine(worker_process._parser().parse_args(argv[2:]))
        return seen[0]

    return see


DEVICE: Final = "cpu"


ROWS: Final[dict[str, Row]] = {
    "rollout.group_size": Seen(3, responses, 3),
    "rollout.group_size_min": Seen(2, responses_at_once, 2),
    "rollout.max_tokens": Seen(2, length, 2, FAKE | {"rollout.ignore_eos": True, "rollout.max_tokens": 20}),
    "rollout.temperature": Seen(0.0, generated, base=FAKE | {"rollout.max_tokens": 20, "rollout.ignore_eos": True}),
    "rollout.top_p": Seen(0.5, sampled_with("top_p"), 0.5),
    "rollout.top_k": Seen(3, sampled_with("top_k"), 3),
    "rollout.min_p": Seen(0.25, sampled_with("min_p"), 0.25),
    "rollout.presence_penalty": Seen(1.0, sampled_with("presence_penalty"), 1.0),
    "rollout.frequency_penalty": Seen(1.0, sampled_with("frequency_penalty"), 1.0),
    "rollout.repetition_penalty": Seen(1.5, sampled_with("repetition_penalty"), 1.5),
    "rollout.ignore_eos": Seen(True, length, 200, FAKE | {"rollout.max_tokens": 200}),
    "rollout.stop": Seen(["m"], generated, base=FAKE | {"rollout.max_tokens": 200, "rollout.ignore_eos": True}),
    "rollout.stop_token_ids": Seen(
        [*range(10, 30)], length, base=FAKE | {"rollout.max_tokens": 200, "rollout.ignore_eos": True}
    ),
    "rollout.seed": Seen(7, generated, base=FAKE | {"rollout.max_tokens": 20, "rollout.ignore_eos": True}),
    "workers.count": Seen(3, begun, 3),
    "workers.engine": Seen("fake", argument("--engine"), "fake"),
    "workers.weights_from": Shown("tests/unit/test_image.py::test_the_setting_needs_gpus_and_a_proof"),
    "workers.batch_invariant": Shown(
        "tests/unit/test_batch_invariant.py::test_the_setting_decides_whatever_the_operator_has_set"
    ),
    "workers.launcher": Shown("tests/unit/test_registries.py::test_unknown_names_are_refused_before_an_engine_starts"),
    "workers.device": Seen("cuda:7", devices, "workers.device"),
    "workers.gpus_for_trainer": Shown("tests/unit/test_placement.py::test_gpus_of_a_trainer_are_kept"),
    "workers.state_mb": Seen(64, argument("--state-mb"), "64"),
    "workers.gpu_memory_utilisation": Seen(0.5, argument("--gpu-memory-utilisation"), "0.5"),
    "workers.slots": Seen(3, capability("slots"), 3, FAKE),
    "workers.kv_tokens": Seen(1024, capability("kv_tokens"), 1024, FAKE),
    "workers.block_tokens": Seen(64, capability("block_tokens"), 64, FAKE),
    "workers.max_model_len_tokens": Seen(300, capability("max_model_len_tokens"), 300, FAKE),
    "workers.dtype": Seen("bfloat16", argument("--dtype"), "bfloat16"),
    "workers.quantisation": Seen("int8", argument("--quantisation"), "int8"),
    "workers.speculation": Seen("history", argument("--speculation"), "history"),
    "workers.history_mb": Seen(7, argument("--history-mb"), "7", {"workers.speculation": "history"}),
    "workers.kv_dtype": Seen("fp8", argument("--kv-dtype"), "fp8"),
    "workers.mismatch_max": Shown("tests/unit/test_precision.py::test_otherwise_precision_stays"),
    "workers.tensor_parallel": Seen(2, argument("--tensor-parallel"), "2"),
    "workers.pipeline_parallel": Seen(2, argument("--pipeline-parallel"), "2"),
    "workers.router_replay": Seen(True, routed, True, FAKE | {"rollout.max_tokens": 5}),
    "workers.threads": Seen(3, threads, "3"),
    "workers.engine_args": Shown(
        "tests/unit/test_engine_args.py::test_a_worker_gets_them_and_they_belong_to_its_state",
        "tests/unit/test_engine_args.py::test_they_reach_vllm",
    ),
    "workers.environment": Shown(
        "tests/unit/test_child_environment.py::test_workers_get_the_stated_environment_and_what_differs_is_logged_once"
    ),
    "workers.restarts": Shown(
        "tests/abuse/test_processes.py::test_the_others_go_on_without_a_worker_that_dies_again_and_again"
    ),
}

# beside the rows above, on real engines
VLLM: Final[dict[str, Seen]] = {
    **{
        f"rollout.{field}": Seen(value, sampled(field), value)
        for field, value in {
            "max_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.25,
            "presence_penalty": 1.0,
            "frequency_penalty": 1.0,
            "repetition_penalty": 1.5,
        }.items()
    },
    "rollout.ignore_eos": Seen(True, sampled("stop_token_ids"), []),
    "rollout.stop_token_ids": Seen([7], sampled("stop_token_ids"), [2, 7]),
    "rollout.seed": Seen(7, sampled("seed")),
    "workers.slots": Seen(3, vllm_argument("max_num_seqs"), 3),
    "workers.block_tokens": Seen(64, vllm_argument("block_size"), 64),
    "workers.max_model_len_tokens": Seen(300, vllm_argument("max_model_len"), 300),
    "workers.dtype": Seen("bfloat16", vllm_argument("dtype"), "bfloat16"),
    "workers.quantisation": Seen("int8", vllm_argument("hf_overrides")),
    "workers.kv_dtype": Seen("fp8", vllm_argument("kv_cache_dtype"), "fp8"),
    "workers.tensor_parallel": Seen(2, vllm_argument("tensor_parallel_size"), 2),
    "workers.pipeline_parallel": Seen(2, vllm_argument("pipeline_parallel_size"), 2),
}
