"""Certificates on the command line: made, named by options, and refused in one line."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dora.ops.cli.app import app
from dora.rpc.roles import Role
from dora.tls import Tls
from dora.tls.authority import AUTHORITY, Authority
from dora.tls.certificate import holder_of
from dora.tls.files import VARIABLES
from tests.owner_token import owner_token
from tests.tls_files import another, cluster
from tests.unit.effects.of_operators import ARGUMENTS

COMMANDS = {
    **ARGUMENTS,
    "eval": ("tiny",),
    "token": ("trainer",),
    "host": ("--join", "127.0.0.1:9", "--rejoin-s", "0"),
    "environment": ("tests.unit.environment_classes:Echo", "--service", "127.0.0.1:9"),
    "front": ("--service", "127.0.0.1:9", "--http", "127.0.0.1:0"),
    "doctor": ("--service", "127.0.0.1:9"),
}


def said(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout + done.stderr


def test_a_clusters_certificates_are_made_and_renewed(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    code, shown = said("tls", "make", str(folder), "--hosts", "gpu-1,10.0.0.5", "--days", "30", "--json")
    assert code == 0 and str(folder / "host-10.0.0.5") in json.loads(shown)["folders"]
    for role in ("service", "host-gpu-1", "front-gpu-1", *(each for each in Role if each is not Role.HOST)):
        found = Tls.of_folder(folder / role).check(serves=role in ("service", "host-gpu-1", "front-gpu-1", "worker"))
        holder = holder_of(found.cert)
        assert holder.roles == {role.partition("-")[0]}
        assert holder.ends - datetime.now(UTC) < timedelta(days=30)
    before, authority = (folder / "trainer/cert.pem").read_bytes(), Authority.read(folder / AUTHORITY)
    assert said("tls", "make", str(folder))[0] == 0
    assert (folder / "trainer/cert.pem").read_bytes() != before
    assert Authority.read(folder / AUTHORITY).certificate == authority.certificate
    assert said("tls", "make", str(folder), "--new-authority")[0] == 0
    assert Authority.read(folder / AUTHORITY).trusted.endswith(authority.trusted)
    assert (folder / "host-gpu-1/ca.pem").read_bytes() == authority.trusted  # it was not renewed
    code, shown = said("tls", "make", str(folder), "--hosts", "a b")
    assert code == 2 and "--hosts = 'a b' is not valid" in shown and "Traceback" not in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_on_a_service_takes_tls_and_refuses_bad_files_in_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("DORA_TLS", *VARIABLES.values()):
        monkeypatch.delenv(variable, raising=False)
    folder = cluster(tmp_path)
    own, trainer, prompts = folder / "operator", folder / "trainer", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    base = (command, *COMMANDS[command])
    if command not in ("host", "front", "environment", "doctor"):
        base += ("--address", "127.0.0.1:9")
    if command == "eval":
        base = ("eval", str(prompts), "--address", "127.0.0.1:9")
    for given, words in (
        (("--tls", str(tmp_path / "none")), "tls.ca"),
        (("--tls", str(own), "--tls-key", str(trainer / "key.pem")), "does not fit"),
        (("--tls", str(own), "--tls-cert", str(trainer / "cert.pem")), "does not fit"),
        (("--tls", str(own), "--tls-ca", str(own / "key.pem")), "holds no certificate"),
        (("--tls-cert", str(own / "cert.pem"), "--tls-key", str(own / "key.pem")), "tls.ca"),
    ):
        if command == "token":
            given += ("--call", "dora.v1.Operator/GetStatus")
        monkeypatch.setenv("DORA_TOKEN", owner_token("mine"))  # a command takes it out of its own environment
        code, shown = said(*base, *given)
        assert code == 2 and words in shown and "Traceback" not in shown, (given, shown)
        assert len(shown.strip().splitlines()) == 1, shown
    assert not any(variable in os.environ for variable in ("DORA_TLS", *VARIABLES.values()))


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_service_refuses_bad_files_in_one_line_at_its_start(dry_run: bool, tmp_path: Path, tiny_dense: Path) -> None:
    folder = cluster(tmp_path / "tls")
    service, now = folder / "service", datetime.now(UTC)
    old = another(folder, "service", tmp_path / "old", now=now - timedelta(days=2))
    early = another(folder, "service", tmp_path / "early", now=now + timedelta(days=2), ends_s=10**6)
    readable = tmp_path / "readable.pem"
    readable.write_bytes((service / "key.pem").read_bytes())
    readable.chmod(0o644)
    settings = ("workers.engine=fake", "workers.max_model_len_tokens=512", "prompts.source=tiny")
    base = ("serve", "--model", str(tiny_dense), *(part for each in settings for part in ("--set", each)))
    refusals = (
        (("--tls", str(tmp_path / "none")), "No such file"),
        (("--tls", str(service), "--tls-key", str(folder / "trainer/key.pem")), "does not fit"),
        (("--tls", str(service), "--tls-key", str(readable)), "mode 0644"),
        (("--tls", str(folder / "trainer")), "unsuitable certificate purpose"),
        (("--tls", str(Path(old.cert).parent)), "expired at"),
        (("--tls", str(Path(early.cert).parent)), "this machine's clock says"),
        (("--tls", str(service), "--tls-ca", str(cluster(tmp_path / "other") / "service/ca.pem")), "is not accepted"),
        (("--tls", str(service), "--tls-clients", "all"), "tls.clients"),
        (("--tls", str(service), "--listen", "127.0.0.2:0"), "not 127.0.0.2"),
        (("--tls", str(service), "--metrics", "127.0.0.2:0"), "not 127.0.0.2"),
    )
    for given, words in refusals if dry_run else refusals[4:6]:
        code, shown = said(*base, *(("--dry-run",) if dry_run else ()), *given)
        assert code == 2 and words in shown and "Traceback" not in shown, (given, shown)
        errors = [line for line in shown.splitlines() if "checked" not in line]
        assert len(errors) == 1, shown
