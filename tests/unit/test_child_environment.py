"""Children get an allow-list of variables, whatever surrounds the service."""

import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from dora.config import WorkersConfig, load_config
from dora.errors import InvalidValue
from dora.host.launcher import WorkerStartError
from dora.host.processes import Processes
from dora.rewards import RewardRunner
from dora.system.environment import DEVICES, child_environment, left_out
from tests.refusals import refused

FUNCTIONS = "tests.unit.reward_functions"
SECRET = "the-owner's"
# Names that have changed or ended engines and interpreters elsewhere.
HARMFUL = (
    *("VLLM_PORT", "VLLM_HOST_IP", "VLLM_ATTENTION_BACKEND", "VLLM_USE_V1", "VLLM_SERVICE_HOST", "DORA_PORT"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "NCCL_SOCKET_IFNAME", "NCCL_ALGO", "NCCL_DEBUG", "GLOO_DEVICE"),
    *("TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR", "TORCH_DISTRIBUTED_DEBUG", "PYTORCH_CUDA_ALLOC_CONF"),
    *("OMP_NUM_THREADS", "OMP_PLACES", "MKL_NUM_THREADS", "KMP_AFFINITY", "RANK", "WORLD_SIZE", "MASTER_ADDR"),
    *("PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONINSPECT", "PYTHONMALLOC", "PYTHONHASHSEED", "PYTHONSTARTUP"),
    *("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy", "GRPC_VERBOSITY"),
    *("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "OPENAI_API_KEY", "SSH_AUTH_SOCK"),
)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_surrounds_it_a_child_gets_what_is_listed_named_or_stated(seed: int) -> None:
    rng = random.Random(seed)
    names = rng.sample(HARMFUL, rng.randrange(1, len(HARMFUL)))
    named = rng.sample(names, rng.randrange(len(names)))
    stated = dict.fromkeys(rng.sample(HARMFUL, 3), "stated")
    around = {
        **dict.fromkeys(names, "outside"),
        "PATH": "/bin",
        "PYTHONPATH": "/a",
        "LC_ALL": "C",
        "DORA_TOKEN": SECRET,
    }
    child = child_environment([*named, *DEVICES], stated, around)
    inherited = {name: around[name] for name in (*named, "PATH", "PYTHONPATH", "LC_ALL")}
    assert child == {**inherited, **stated}, (seed, names)
    assert not set(left_out(child, around)) & {*inherited, "DORA_TOKEN"} - set(stated)


@pytest.mark.parametrize(("around", "told"), [({}, []), ({"GRPC_VERBOSITY": "DEBUG"}, ["GRPC_VERBOSITY"])])
def test_what_a_command_sets_itself_is_nobodys_surroundings(around: dict[str, str], told: list[str]) -> None:
    program = (
        "import dora.ops.cli, json, dora.system.environment as e; print(json.dumps(e.left_out(e.child_environment())))"
    )
    clean = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    run = subprocess.run([sys.executable, "-c", program], env={**clean, **around}, capture_output=True, check=True)
    assert json.loads(run.stdout) == told


@pytest.mark.parametrize("pattern", ["DORA_TOKEN", "DORA_*", "*"])
def test_no_pattern_passes_the_owners_token(pattern: str) -> None:
    assert (
        child_environment([pattern], parent={"DORA_TOKEN": SECRET, "DORA_ADDRESS": "here:1"}).get("DORA_TOKEN") is None
    )


@pytest.mark.parametrize("name", ["A=b", "", "A B", "1A", "A-B"])
@pytest.mark.parametrize("section", ["workers", "reward"])
def test_a_name_is_a_variables(section: str, name: str) -> None:
    with refused(InvalidValue, field=f"{section}.environment.0", value=name):
        load_config(None, [f"{section}.environment=['{name}']"])


async def test_a_reward_function_sees_neither_token_nor_descriptors_and_what_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DORA_TOKEN", SECRET)
    for name in HARMFUL:
        monkeypatch.setenv(name, SECRET)
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    runner = await RewardRunner.start(f"{FUNCTIONS}:surroundings", environment=["OPENAI_API_KEY"])
    try:
        reward = await runner.score("", "", (), "{}")
        names, files, folder = reward.log.split("|")
        assert reward.valid and "DORA_TOKEN" not in names.split()
        assert set(names.split()) & set(HARMFUL) == {"OPENAI_API_KEY"}
        assert os.readlink(f"/proc/self/fd/{read_end}") not in files.split()
        assert len([each for each in files.split() if each.startswith("pipe:")]) <= 4  # calls, verdicts, prints twice
        assert folder == str(Path.cwd())
    finally:
        await runner.close()
        os.close(read_end)
        os.close(write_end)


async def test_workers_get_the_stated_environment_and_what_differs_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DORA_TOKEN", SECRET)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for name in HARMFUL:
        monkeypatch.setenv(name, SECRET)
    script = "import os; [print(f'{k}={v}') for k, v in os.environ.items()]; print('pgid', os.getpgid(0))"
    show = ["-c", script]
    config = WorkersConfig(engine="fake", restarts=0, environment=("NCCL_*",))
    with caplog.at_level(logging.INFO, "dora.service"):
        launcher = Processes(
            config, lambda _: show, lambda name: {"DORA_TOKEN": name, "OMP_NUM_THREADS": "1"}, tmp_path
        )
        for name in ("worker-0", "worker-1"):
            launcher.start(name)
        with refused(WorkerStartError, field="worker_id"):
            await launcher.failed
        await launcher.close()
    seen = dict(line.split("=", 1) for line in (tmp_path / "worker-0.log").read_text().splitlines() if "=" in line)
    assert seen["DORA_TOKEN"] == "worker-0" and seen["OMP_NUM_THREADS"] == "1" and seen["CUDA_VISIBLE_DEVICES"] == "3"
    assert {name for name in HARMFUL if name in seen} == {
        "OMP_NUM_THREADS",
        "NCCL_SOCKET_IFNAME",
        "NCCL_ALGO",
        "NCCL_DEBUG",
    }
    assert SECRET not in {seen[name] for name in seen if not name.startswith("NCCL_")}
    told = [each.getMessage() for each in caplog.records if "workers.environment" in each.getMessage()]
    assert len(told) == 1 and "VLLM_PORT" in told[0] and "OMP_NUM_THREADS" in told[0] and SECRET not in told[0]
    assert f"pgid {os.getpgid(0)}" not in (tmp_path / "worker-0.log").read_text()
