"""``dora cluster`` on a real Slurm: preempted and lost nodes, a requeued service, hosts that come and go."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dora.cluster.adapter import Job
from dora.cluster.run_file import read_run_file
from dora.cluster.slurm import SlurmCluster
from dora.system.ownership import hold
from tests.clusters.runs import Run
from tests.clusters.slurm import Slurm, is_there, with_marks
from tests.snippets import ROOT

pytestmark = pytest.mark.xdist_group("slurm")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if not is_there():
        pytest.skip("there is no Slurm: `make slurm` fetches it from Debian's packages")
    with Slurm(tmp_path / "slurm") as started:
        yield started


def run_on(slurm: Slurm, at: Path, model: Path, **table: Any) -> Run:
    own = {"address": "127.0.0.1", "dora": f"{Path(sys.executable).with_name('dora')}"}
    return Run("slurm", sys.executable, slurm.environment, at, model, **{**own, **table})


@pytest.mark.parametrize("engine", ["fake", pytest.param("vllm", marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
async def test_a_run_outlives_what_slurm_does_to_it(
    slurm: Slurm, tmp_path: Path, tiny_dense: Path, engine: str
) -> None:
    """Each group comes once, whichever node is preempted, dies, or is requeued; then nothing is left. Of real engines,
    each logprob is that of its version.
    """
    run = run_on(slurm, tmp_path, tiny_dense, engine=engine)  # whose commands get its --file
    done = run.dora("up", "--hosts", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert sorted(job["part"] for job in json.loads(done.stdout)) == ["host", "host", "service"]
    first, second = (job["name"] for job in run.jobs("host"))
    await run.until_hosts(f"h{first}", f"h{second}")
    machines = {job["name"]: job["machine"] for job in run.jobs("host")}

    async def preempted() -> None:  # a job of more rank takes the first host's node for a while
        node = f"--nodelist={machines[first]}"
        slurm.call("sbatch", "--partition=high", node, "--output=/dev/null", "--wrap=sleep 1")

    async def lost() -> None:
        await asyncio.to_thread(slurm.lose_node, machines[second], second)

    async def requeued() -> None:
        slurm.call("scontrol", "requeue", run.jobs("service")[0]["name"])

    await run.trained(tiny_dense, [preempted, lost, requeued])
    await run.until_hosts(f"h{first}")
    async with asyncio.timeout(90):  # Slurm sees that the node is down, and requeues its job
        waits = {first: "running", second: "pending"}
        while {job["name"]: job["state"] for job in run.jobs("host")} != waits:  # noqa: ASYNC110  nobody tells when
            await asyncio.sleep(0.5)
    scaled = json.loads(run.dora("scale", "1", "--json").stdout)
    assert {job["part"] for job in scaled} == {"service", "host"}, "hosts beyond the number are released"
    assert [job["name"] for job in run.jobs("host")] == [first], "one that does not run is released first"
    assert run.dora("scale", "0").returncode == 0
    await run.until_hosts()
    ended = run.dora("down")
    assert ended.returncode == 0 and "killed" not in ended.stderr, ended.stderr
    assert run.jobs("service") == run.jobs("host") == []
    assert with_marks([f"{run.shared}"]) == []
    run.check_record()


async def test_a_host_is_asked_for_as_the_service_advises(slurm: Slurm, tmp_path: Path, tiny_dense: Path) -> None:
    """The service's job follows its advice; so can anybody who has its token."""
    run = run_on(slurm, tmp_path, tiny_dense)
    run.file.write_text(run.file.read_text() + '[cluster]\nautoscale = "act"\nhosts_min = 1\n')
    assert run.dora("up", "--hosts", "0").returncode == 0
    async with asyncio.timeout(120):
        while not (hosts := run.jobs("host")):  # noqa: ASYNC110  nobody tells when
            await asyncio.sleep(0.5)
    await run.until_hosts(f"h{hosts[0]['name']}")
    again = run.dora("follow", "--address", run.address, "--token-file", str(run.shared / "token"), "--once")
    assert again.returncode == 0 and not again.stderr, "there are as many as are advised"
    assert run.dora("down").returncode == 0 and with_marks([f"{run.shared}"]) == []


def test_what_slurm_refuses_is_said_and_nothing_stays(slurm: Slurm, tmp_path: Path, tiny_dense: Path) -> None:
    run = run_on(slurm, tmp_path, tiny_dense, host=["--partition=nowhere"])
    done = run.dora("up")
    assert done.returncode == 2 and "slurm.host" in done.stderr and "nowhere" not in done.stdout
    assert run.jobs() == []  # by `status --json`
    assert len(done.stderr.splitlines()) == 1 and run.jobs("service") == run.jobs("host") == []
    run.file.write_text(run.file.read_text().replace('"--partition=nowhere"', '"--partition=low"'))
    assert run.dora("up", "--hosts", "2").returncode == 0
    again = run.dora("up")
    assert again.returncode == 2 and "has job" in again.stderr and len(again.stderr.splitlines()) == 1
    for job in run.jobs():  # killed in its start
        slurm.call("scancel", "--signal=KILL", "--full", job["name"])
    assert run.dora("down").returncode == 0 and run.jobs() == []
    assert with_marks([f"{run.shared}"]) == []
    run.file.write_text(run.file.read_text().replace(f"{run.shared}", "/proc/no"))
    unusable = run.dora("up")
    assert unusable.returncode == 2 and "slurm.folder" in unusable.stderr


def test_a_start_that_fails_or_is_interrupted_leaves_nothing(slurm: Slurm, tmp_path: Path, tiny_dense: Path) -> None:
    """Also if the service runs already, which requeues itself when it is stopped."""
    run = run_on(slurm, tmp_path / "a b%j", tiny_dense)  # a folder's name is no pattern of Slurm's
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    runs = f'until [ -s "{run.shared}/address" ]; do sleep 0.2; done'
    slurms = shutil.which("sbatch", path=slurm.environment["PATH"])
    environment = {**slurm.environment, "PATH": f"{tmp_path}/bin:{slurm.environment['PATH']}"}
    for then, code, said in (
        ("echo over a limit >&2; exit 1", 2, "what Slurm accepts: over a limit"),
        ("kill -INT $PPID; sleep 60", 130, "interrupted"),
    ):
        sbatch.write_text(f'#!/bin/bash\ncase "$*" in *host.sh) {runs}; {then} ;; esac\nexec {slurms} "$@"\n')
        sbatch.chmod(0o755)
        command = ["env", "--default-signal=INT", sys.executable, "-m", "dora", "cluster", "up", "--file", run.file]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
        assert slurm.call("squeue", "--noheader") == "" and with_marks([f"{run.shared}"]) == []
        (run.shared / "address").unlink()


def test_a_run_is_started_once_before_it_is_scaled(slurm: Slurm, tmp_path: Path, tiny_dense: Path) -> None:
    run = run_on(slurm, tmp_path, tiny_dense)
    for words in (["scale", "2"], ["down"], ["down"], ["scale", "2"]):
        done = run.dora(*words)
        assert (done.returncode, "dora cluster up" in done.stderr) == ((2, True) if words[0] == "scale" else (0, False))
    run.shared.mkdir(exist_ok=True)
    with closing(hold(run.shared / "starting")):
        done = run.dora("up")
    assert done.returncode == 2 and "is being started" in done.stderr and len(done.stderr.splitlines()) == 1
    assert slurm.call("squeue", "--noheader") == ""


@pytest.mark.parametrize(
    ("table", "part", "said"),
    [
        ({"setup": ["export SLURM_JOB_GPUS=0 CUDA_VISIBLE_DEVICES="]}, "host", "sees no GPU"),
        ({"dora": "/no/dora"}, "service", "/no/dora: No such file or directory"),
    ],
)
async def test_a_node_that_cannot_have_its_part_is_released_and_the_status_says_why(
    table: dict[str, Any], part: str, said: str, slurm: Slurm, tmp_path: Path, tiny_dense: Path
) -> None:
    run = run_on(slurm, tmp_path, tiny_dense, **table)
    assert run.dora("up").returncode == 0
    async with asyncio.timeout(120):
        while not (found := [job for job in run.jobs(part) if job["state"] == "refused"]):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    assert said in found[0]["reason"]
    assert found[0]["name"] not in slurm.call("squeue", "--noheader", "--format=%i", "--states=running").split()
    assert run.dora("down").returncode == 0
    assert run.jobs() == [] and with_marks([f"{run.shared}"]) == []


def test_a_job_that_has_ended_since_it_was_listed_is_no_error(
    slurm: Slurm, tmp_path: Path, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(slurm, tmp_path, tiny_dense)
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    cluster = SlurmCluster(read_run_file(run.file))
    before, now = [[Job("4711", "host", "running")]], cluster.jobs
    monkeypatch.setattr(cluster, "jobs", lambda: before.pop() if before else now())
    assert cluster.down() == [] and not before


async def test_the_pages_lines_work_as_printed(slurm: Slurm, tmp_path: Path, tiny_dense: Path) -> None:
    """On this Slurm's partitions, without GPUs, and with a folder of the test in place of /shared."""
    section = (ROOT / "docs" / "clusters.md").read_text().partition("## On Slurm\n")[2].partition("\n## ")[0]
    table = section.partition("```toml\n")[2].partition("```")[0]
    run = run_on(slurm, tmp_path, tiny_dense)
    for printed, here in (
        ("--partition=cpu", "--partition=low"),
        ("--partition=gpu", "--partition=low"),
        (', "--gres=gpu:8"', ""),
        (', "--cpus-per-task=8"', ""),
        ("/shared/run1", f"{run.shared}"),
        ("/shared/venv", sys.prefix),
    ):
        assert printed in table
        table = table.replace(printed, here)
    lines, port = run.file.read_text().partition("[slurm]")[0], run.address.rpartition(":")[2]
    run.file.write_text(f'{lines}[slurm]\naddress = "127.0.0.1"\nport = {port}\n{table.partition("[slurm]")[2]}')
    up, status, scale, down = (line.strip() for line in section.splitlines() if line.startswith("    dora"))
    environment = {**slurm.environment, "PATH": f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"}

    def typed(*commands: str) -> str:
        script = "\n".join(["set -e", *commands])
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert typed(up).count(" host ") == 4
    first, second, *_ = (job["name"] for job in run.jobs("host"))
    await run.until_hosts(f"h{first}", f"h{second}")  # the third node has the service
    assert typed(status).count("running") == 3 and typed(scale).count(" host ") == 8
    typed(down)
    assert run.jobs() == [] and with_marks([f"{run.shared}"]) == []


def test_the_scripts_can_be_read_and_submitted_by_hand(tmp_path: Path, tiny_dense: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'model = "{tiny_dense}"\n[slurm]\nfolder = "{tmp_path}/a b"\n'
        'host = ["--gres=gpu:8"]\nsetup = ["module load x"]'
    )
    command = [sys.executable, "-m", "dora", "cluster", "up", "--dry-run", "--file", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    service, host = printed.split("# host.sh\n")
    assert "#SBATCH --gres=gpu:8\n" in host and "#SBATCH --gres" not in service and "\nmodule load x\n" in host
    for script in (service, host):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        run = subprocess.run(
            ["bash"], input=script, env={"SLURM_JOB_ID": "1"}, capture_output=True, text=True, check=False
        )
        assert run.returncode == 2 and "slurm.folder must be on storage that all nodes share" in run.stdout
        assert len(run.stdout.splitlines()) == 1 and not run.stderr
    assert not (tmp_path / "a b").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "[slurm]"),
        ("slurm = 3", "slurm = 3 is not valid: it must be a table"),
        ("[[slurm]]", "slurm = [{}] is not valid: it must be a table"),
        ("[slurm]\nhosts = 2", "slurm.folder"),
        ('[slurm]\nfolder = "x"\nhost = "--gres=gpu"', "slurm.host"),
        ('[slurm]\nfolder = "x"\n[windw]\nsize = 2', "windw"),
        ('[slurm]\nfolder = "x"', "squeue"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    command = [sys.executable, "-m", "dora", "cluster", "up", "--hosts", "1"]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and named in done.stderr and len(done.stderr.splitlines()) <= 2, done.stderr


def test_an_entry_point_adds_a_scheduler(tmp_path: Path) -> None:
    """Its table is another one in the same file."""
    installed = tmp_path / "site" / "oar-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Name: oar\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[dora.clusters]\noar = oar:Oar\n")
    (tmp_path / "site" / "oar.py").write_text(
        "class Oar:\n    def __init__(self, file): self.file = file\n"
        "    def planned(self): return {'job': self.file.table['queue']}\n"
    )
    file = tmp_path / "run.toml"
    file.write_text('[oar]\nqueue = "long"\n')
    command = [sys.executable, "-m", "dora", "cluster", "up", "--dry-run", "--file", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "# job\nlong\n"
