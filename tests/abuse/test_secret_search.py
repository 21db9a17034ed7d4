"""A small service with everything around it, then a search of all that it left for each of its secrets.

Service, workers, pool, host agent, trainer, commands, failures. Each token and KV secret is looked for in plain, hex,
base64 and URL-quoted form: in every file, line of a log, argument, and environment of a process.
"""

import base64
import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

import dora
from dora.rpc.roles import Role, ServiceTokens

OWNER = "owner's s3cret/of+this=run? 9Zk2+wQ7x/T4mV0="
WAIT_S = 120.0
WIPED = re.compile(rb"(^|\0)DORA_TOKEN=(\0|$)")
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda secret: secret,
    "hex": lambda secret: secret.hex().encode(),
    "HEX": lambda secret: secret.hex().upper().encode(),
    "base64": lambda secret: base64.b64encode(secret).rstrip(b"="),
    "base64 of a URL": lambda secret: base64.urlsafe_b64encode(secret).rstrip(b"="),
    "URL-quoted": lambda secret: quote(secret, safe="").encode(),
    "JSON": lambda secret: json.dumps(secret.decode(errors="replace"))[1:-1].encode(),
}
SETTINGS = (
    *("workers.engine=fake", "workers.max_model_len_tokens=512", "workers.kv_tokens=4096", "kv.pool_mb=16"),
    *("window.groups_per_step=4", "rollout.max_tokens=24", "service.keep_events=true", "reward.workers=1"),
)
TWO_STEPS = """
import os, sys
from pathlib import Path
import dora.sync
with dora.sync.Trainer(sys.argv[1], token=os.environ["DORA_TOKEN"]) as trainer:
    for step in trainer.steps(groups=4):
        for group in step:
            pass
        step.commit(weights=Path(sys.argv[2]), wait=True)
        if step.number == 1:
            break
"""


class Scene:
    """Processes with their output in files of ``root``, and all arguments and environments that were seen."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.running: list[psutil.Popen] = []
        self.seen: dict[tuple[int, float], dict[str, bytes]] = {}  # arguments and environment of each process

    def begin(self, name: str, *arguments: str, token: str = "", module: str = "dora") -> psutil.Popen:
        path = os.pathsep.join([str(Path(dora.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(self.root / "tokens"), "OTHER": "kept"}
        environment.pop("DORA_TOKEN", None)
        if token:
            environment["DORA_TOKEN"] = token
        with (self.root / f"{name}.out").open("wb") as said, (self.root / f"{name}.err").open("wb") as errors:
            process = psutil.Popen(
                [sys.executable, "-m", module, *arguments], env=environment, stdout=said, stderr=errors, cwd=self.root
            )
        self.running.append(process)
        return process

    def end(self, name: str, *arguments: str, token: str = "", module: str = "dora", code: int | None = 0) -> None:
        process = self.begin(name, *arguments, token=token, module=module)
        self.until(lambda: process.poll() is not None)
        assert code is None or process.returncode == code, (self.root / f"{name}.err").read_text()

    def until(self, is_so: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < ends_s, [each.read_text() for each in self.root.glob("*.err")]
            self.look()
            time.sleep(0.3)

    def look(self) -> None:
        """Notes arguments and environments of all processes below those that were begun."""
        for begun in self.running:
            try:
                for process in begun.children(recursive=True):
                    pid = Path("/proc") / str(process.pid)
                    found = {name: (pid / name).read_bytes() for name in ("cmdline", "environ")}
                    key = process.pid, process.create_time()
                    before = self.seen.get(key, {}).get("environ", b"")
                    if WIPED.search(found["environ"]) and not WIPED.search(before):
                        found["environ"] = before or found["environ"]  # a process removes its token once it has read it
                    self.seen[key] = found
                self.seen.setdefault((begun.pid, begun.create_time()), {})["cmdline"] = (
                    Path("/proc") / str(begun.pid) / "cmdline"
                ).read_bytes()
            except (psutil.Error, OSError):
                continue

    def close(self) -> None:
        for process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


@pytest.mark.full
def test_no_secret_is_where_it_is_not_needed(tiny_dense: Path, tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    (tmp_path / "tokens").mkdir(mode=0o700)
    try:
        secrets, allowed = drama(scene, tiny_dense)
    finally:
        scene.close()
    assert len({name for name in secrets if name.startswith("worker ")}) >= 4, (
        "workers, one of them twice, and the pool"
    )
    searched_files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")}
    for name in ("record/steps.jsonl", "run/logs/w0.log", "service.err", "wrong.err"):
        assert name in searched_files
    everywhere = list(searched(scene, secrets))
    assert ("service.out", str(Role.OWNER)) in everywhere, "the search finds what is shown on purpose"
    found = [place for place in everywhere if place not in allowed]
    assert not found, "\n".join(map(str, found))


def drama(scene: Scene, model: Path) -> tuple[dict[str, bytes], set[tuple[str, str]]]:
    """Runs it. Returns the secrets by name, and the places that may have one, as (place, name of the secret)."""
    root = scene.root
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    common = [
        *("serve", "--model", str(model), "--prompts", "tiny", "--state", str(root / "state"), "--workers", "2"),
        *("--listen", "127.0.0.1:0", "--set", f"service.run_folder={root / 'run'}", *options),
    ]
    service = scene.begin("service", *common, "--record", str(root / "record"), "--json", token=OWNER)
    banner = root / "service.out"
    scene.until(lambda: banner.read_text().rstrip().endswith("}") or service.poll() is not None)
    address = json.loads(banner.read_text())["address"]
    tokens = ServiceTokens(OWNER).of
    given = ("--address", address)
    agent = scene.begin(
        "host", "host", "--join", address, "--name", "h", "--workers", "1", "--folder", str(root / "agent"),
        token=tokens[Role.HOST],
    )  # fmt: skip
    scene.end("status", "status", *given, "--json", token=tokens[Role.OPERATOR])
    scene.end("wrong", "status", *given, token=OWNER[:-1], code=None)
    scene.end("role", "checkpoint", *given, token=tokens[Role.SUBMITTER], code=None)
    scene.end("second", *common, token=OWNER, code=None)  # the state folder is in use
    scene.end("bad", *common, "--set", "service.token=abc", token=OWNER, code=None)
    worker = next(each for each in service.children() if "w0" in each.cmdline())
    worker.kill()
    trainer = (*given, "--groups", "4", "--steps", "2", "--model", str(model), "--lr", "1e-6")
    (root / "two_steps.py").write_text(TWO_STEPS)
    scene.end("trainer", address, str(model), token=tokens[Role.TRAINER], module="two_steps")
    scene.end("impostor", *trainer, token=tokens[Role.OPERATOR], module="dora.trainers.grpo", code=None)
    scene.end("hosts", "hosts", *given, "--json", token=tokens[Role.OPERATOR])
    scene.end("checkpoint", "checkpoint", *given, token=OWNER)
    agent.send_signal(signal.SIGTERM)
    scene.until(lambda: agent.poll() is not None)
    service.send_signal(signal.SIGTERM)
    scene.until(lambda: service.poll() is not None)
    identity = json.loads((root / "state" / "service.json").read_text())
    secrets = {str(role): token.encode() for role, token in tokens.items()}
    secrets["kv"] = bytes.fromhex(identity["kv_secret"])
    for key, seen in scene.seen.items():
        for line in seen.get("environ", b"").split(b"\0"):
            if line.startswith(b"DORA_TOKEN=") and line != b"DORA_TOKEN=":
                secrets[f"worker {key[0]}"] = line.removeprefix(b"DORA_TOKEN=")
    own = {(f"environ of {key[0]}", f"worker {key[0]}") for key in scene.seen}
    shown = {("service.out", str(role)) for role in tokens}  # how to attach
    return secrets, own | shown | {("state/service.json", str(Role.OWNER)), ("state/service.json", "kv")}


def searched(scene: Scene, secrets: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """The places with a secret, as (place, name of the secret)."""
    for name, content in contents(scene):
        for secret, value in secrets.items():
            if any(form(value) in content for form in FORMS.values()):
                yield name, secret


def contents(scene: Scene) -> Iterator[tuple[str, bytes]]:
    for file in scene.root.rglob("*"):
        if file.is_file() and not file.is_symlink():
            name = str(file.relative_to(scene.root))
            if name.endswith("service.json"):
                assert stat.S_IMODE(file.stat().st_mode) == 0o600
            yield name, file.read_bytes()
    for (pid, _), seen in scene.seen.items():
        for what, content in seen.items():
            yield f"{what} of {pid}", content


def test_the_search_finds_every_form(tmp_path: Path) -> None:
    secret = b"a/b+c d"
    for number, form in enumerate(FORMS.values()):
        (tmp_path / str(number)).write_bytes(b"x" + form(secret) + b"y")
    assert len(list(searched(Scene(tmp_path), {"it": secret}))) == len(FORMS)
