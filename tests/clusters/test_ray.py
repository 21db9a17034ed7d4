"""``dora cluster`` and ``dora.ray`` on a real Ray: drained and lost nodes, a service that moves, hosts come and go."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import dora
from dora.cluster.ray import Cluster
from dora.cluster.ray_order import RayTable
from dora.cluster.run_file import read_run_file
from dora.data.validation import validated_as
from dora.errors import InvalidValue
from tests.clients.environments import python_of
from tests.clusters.ray_nodes import Ray
from tests.clusters.runs import Run
from tests.clusters.slurm import with_marks
from tests.refusals import refused
from tests.snippets import ROOT, snippet

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def head() -> Iterator[Ray]:
    with Ray() as started:
        yield started


@pytest.fixture
def ray(head: Ray) -> Iterator[Ray]:
    """A Ray whose head alone runs, as it does again after the test."""
    yield head
    head.clear()


def run_on(ray: Ray, at: Path, model: Path, **table: Any) -> Run:
    return Run("ray", ray.python, ray.environment, at, model, **table)


def check_nothing_is_left(ray: Ray, run: Run) -> None:
    assert ray.left() == []
    assert with_marks([f"{run.shared}", run.address]) == []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110  nobody tells when
            await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    ("engine", "rounds"),
    [
        ("fake", 1),
        pytest.param("fake", 4, marks=pytest.mark.full),
        pytest.param("vllm", 1, marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
)
async def test_a_run_outlives_what_ray_does_to_it(
    engine: str, rounds: int, ray: Ray, tmp_path: Path, tiny_dense: Path
) -> None:
    """Each group comes once, whichever node is drained or dies; then nothing is left. Of real engines, each logprob is
    that of its version.
    """
    for _ in range(2):
        ray.add()
    run = run_on(ray, tmp_path, tiny_dense, engine=engine)
    done = run.dora("up", "--hosts", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert [job["name"] for job in json.loads(done.stdout)] == ["service", "h0", "h1"]
    await run.until_hosts("h0", "h1")

    def replaced(node: str) -> None:
        ray.lose(node)
        ray.add()

    async def drained() -> None:
        node = ray.where()["h0"]
        ray.drain(node, 300.0)
        await run.until_hosts("h1")
        (job,) = (job for job in run.jobs() if job["name"] == "h0")
        assert job["state"] == "draining" and job["reason"].startswith("its node goes in 2")
        await asyncio.to_thread(replaced, node)
        await run.until_hosts("h0", "h1")

    async def killed() -> None:
        await asyncio.to_thread(replaced, ray.where()["h1"])
        await run.until_hosts("h0", "h1")

    await run.trained(tiny_dense, [drained, killed] * rounds)
    if engine == "fake":
        await scaled(ray, run)
    ended = run.dora("down")
    assert ended.returncode == 0 and "killed" not in ended.stderr, ended.stderr
    assert run.jobs() == []
    check_nothing_is_left(ray, run)
    run.check_record()


async def scaled(ray: Ray, run: Run) -> None:
    """Two hosts become three, of which one waits for a node, and then one."""
    more = json.loads(run.dora("scale", "3", "--json").stdout)
    assert [job["name"] for job in more] == ["service", "h0", "h1", "h2"]
    await until(lambda: run.jobs()[-1]["state"] == "pending")
    assert "no node has room" in run.jobs()[-1]["reason"]
    ray.add()
    await run.until_hosts("h0", "h1", "h2")
    assert run.dora("scale", "1").returncode == 0
    await run.until_hosts("h0")


@pytest.mark.full
async def test_the_service_moves_with_its_state(ray: Ray, tmp_path: Path, tiny_dense: Path) -> None:
    """Its node dies, and the hosts find it elsewhere."""
    for _ in range(2):
        ray.add()
    run = run_on(ray, tmp_path, tiny_dense, service={"CPU": 1})
    assert run.dora("up").returncode == 0
    await run.until_hosts("h0")

    async def lost() -> None:
        node = ray.where()["service"]
        await asyncio.to_thread(ray.add)
        await asyncio.to_thread(ray.lose, node)

    await run.trained(tiny_dense, [lost])
    await run.until_hosts("h0")
    assert run.dora("down").returncode == 0
    check_nothing_is_left(ray, run)


def _other_release(folder: Path) -> None:
    for each in Path(dora.__file__).parent.iterdir():
        (folder / "dora" / each.name).symlink_to(each)
    (folder / "dora" / "release.py").unlink()
    (folder / "dora" / "release.py").write_text('__version__ = "0.0.1"\n')


def _without_dora(folder: Path) -> None:
    (folder / "dora" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'dora'\")\n")


@pytest.mark.parametrize(
    ("installed", "gpus", "said"),
    [
        (
            _other_release,
            0,
            f"h0 was refused: version = '0.0.1' is not valid: it must be that of the other nodes, {dora.__version__}",
        ),
        (_without_dora, 0, "h0 was refused: ModuleNotFoundError: No module named 'dora'"),
        (None, 64, "h0 was refused: ray.gpus = 64 is not valid: it must be at most"),
    ],
)
def test_a_node_that_cannot_be_a_host_is_named_and_nothing_stays(
    installed: Callable[[Path], None] | None, gpus: int, said: str, ray: Ray, tmp_path: Path, tiny_dense: Path
) -> None:
    variables = {}
    if installed is not None:
        (tmp_path / "site" / "dora").mkdir(parents=True)
        installed(tmp_path / "site")
        variables = {"PYTHONPATH": f"{tmp_path}/site"}
    ray.add(variables, num_gpus=gpus)
    run = run_on(ray, tmp_path, tiny_dense, gpus=gpus)
    done = run.dora("up")
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    check_nothing_is_left(ray, run)


def test_what_no_node_has_is_said_and_nothing_stays(ray: Ray, tmp_path: Path, tiny_dense: Path) -> None:
    run = run_on(ray, tmp_path, tiny_dense, cpus=4096)
    done = run.dora("up")
    assert done.returncode == 2 and "{'CPU': 4096.0}" in done.stderr and "ray status" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    ray.add()
    for table in ({"service": {}}, {"service": {"CPU": -1}}, {"cpus": 0}):
        run = run_on(ray, tmp_path, tiny_dense, **table)
        done = run.dora("up")
        assert done.returncode == 2 and "what Ray accepts" in done.stderr and len(done.stderr.splitlines()) == 1
        assert ray.left() == []
    done = run.dora("scale", "2")
    assert done.returncode == 2 and "dora cluster up" in done.stderr and len(done.stderr.splitlines()) == 1
    run = run_on(ray, tmp_path, tiny_dense, hosts=0, folder="/proc/no")
    done = run.dora("up")
    assert done.returncode == 2 and "ray.folder = '/proc/no'" in done.stderr
    assert ray.left() == []


async def test_a_start_that_is_interrupted_leaves_nothing(ray: Ray, tmp_path: Path, tiny_dense: Path) -> None:
    ray.add()
    run = run_on(ray, tmp_path, tiny_dense)
    words = ["-m", "dora", "cluster", "up", "--file", str(run.file)]
    command = ["env", "--default-signal=INT", ray.python, *words]  # a shell's background job ignores it
    starting = await asyncio.create_subprocess_exec(*command, env=ray.environment)
    await until(lambda: with_marks([f"--listen {run.address}"]) != [])
    starting.send_signal(signal.SIGINT)
    assert await starting.wait() == 130
    check_nothing_is_left(ray, run)


@pytest.mark.parametrize("words", ["up", "status", "scale 2", "down"])
def test_without_ray_one_line_says_what_to_do(words: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[slurm]\nfolder = "x"\n')
    command = [sys.executable, "-m", "dora", "cluster", *words.split(), "--ray"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "ray is missing: it must be installed here and on all nodes" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "dora-run").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "nowhere"])
def test_without_a_cluster_one_line_says_what_to_do(address: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[ray]\naddress = "{address}"\n')
    command = [python_of("ray"), "-m", "dora", "cluster", "status"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = f"dora: ray.address = '{address}' is not valid: it must be HOST:PORT of a Ray cluster that runs"
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_what_would_be_started_is_printed_without_ray(tmp_path: Path, tiny_dense: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{tiny_dense}"\n[ray]\nfolder = "{tmp_path}/a b"\nhosts = 3\ngpus = 8\nworkers = 4\n')
    command = [sys.executable, "-m", "dora", "cluster", "up", "--dry-run", "--file", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    service, host = printed.split("# host, 3 times\n")
    assert f"--state '{tmp_path}/a b/state' --listen NODE:7070" in service and "{'CPU': 1.0, 'GPU': 8}" in host
    assert "dora host --join NODE:7070 --name h0 --device cuda --rejoin-s 30 --workers 4\n" in host
    assert not (tmp_path / "a b").exists()


def test_an_engine_over_several_hosts_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[workers]\ntensor_parallel = 8\npipeline_parallel = 2\n[ray]\ngpus = 8\n")
    with refused(InvalidValue, field="ray.gpus", value=8, names=("at least 16", "tensor_parallel", "share one host")):
        Cluster(file)


def test_a_script_starts_and_ends_a_run(ray: Ray, tmp_path: Path, tiny_dense: Path) -> None:
    """As it is printed in docs/clusters.md."""
    for _ in range(2):
        ray.add()
    run = run_on(ray, tmp_path, tiny_dense)
    printed = snippet("docs/clusters.md", "dora.ray.Cluster")
    (tmp_path / "script.py").write_text(
        "taken = []\n"
        "def train(step):\n"
        "    taken.extend(step)\n"
        "    if step.number == 2:\n"
        "        raise SystemExit(len({group.group_id for group in taken}))\n"
        f"    return {str(tiny_dense)!r}\n"
        f"{printed}"
    )
    script = [ray.python, "script.py"]
    done = subprocess.run(script, cwd=tmp_path, env=ray.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 12, done.stderr  # three steps of four groups
    check_nothing_is_left(ray, run)


def test_the_manifest_for_kuberay_is_of_one_piece(tmp_path: Path) -> None:
    """Its table is valid, and each worker's pod has what a host asks for."""
    config, claim, job = yaml.safe_load_all((ROOT / "deploy/ray/rayjob.yaml").read_text(encoding="utf-8"))
    (tmp_path / "run.toml").write_text(config["data"]["run.toml"])
    run = read_run_file(tmp_path / "run.toml")
    table = validated_as(RayTable, run.table, "ray")
    cluster = job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"], run.scheduler) == ("ray.io/v1", "RayJob", "ray")
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "locks/ray.txt").read_text()
    (workers,) = cluster["workerGroupSpecs"]
    (host,) = workers["template"]["spec"]["containers"]
    limits = host["resources"]["limits"]
    assert table.hosts == workers["replicas"] <= workers["maxReplicas"]
    assert (table.cpus, table.gpus) == (int(limits["cpu"]), int(limits["nvidia.com/gpu"]))
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    mounted = {each["name"]: each["mountPath"] for each in head["volumeMounts"]}
    volumes = {each["name"]: each for each in cluster["headGroupSpec"]["template"]["spec"]["volumes"]}
    assert set(mounted) == set(volumes) and table.folder.startswith(mounted["state"])
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volumes["run"]["configMap"]["name"] == config["metadata"]["name"] and mounted["run"] == "/etc/dora"
