"""The lines that ``dora serve`` prints once it is ready."""

from pathlib import Path

import pytest

from dora.config import load_config
from dora.ops.cli.serve import _print_attach
from dora.orchestrator.main import ServiceHandle
from dora.orchestrator.version_memory import VersionMemory
from dora.rpc.roles import ServiceTokens


@pytest.mark.parametrize("state", ["", "out/state"])
def test_the_banner_says_what_ctrl_c_does(state: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(None, [("service.state", state)] if state else [])
    handle = ServiceHandle("127.0.0.1:7070", ServiceTokens().of, Path("run"), Path("model"), 0.0)
    _print_attach(handle, config, as_json=False)
    said = capsys.readouterr().out
    assert ("Ctrl-C drains and stops." in said) is not bool(state)
    assert (f"the next start with --state {state} carries on" in said) is bool(state)


def test_the_banner_says_what_the_versions_take(capsys: pytest.CaptureFixture[str]) -> None:
    memory = VersionMemory(4, 65 * 10**9, 260 * 10**9, 512 * 10**9, Path("run"))
    handle = ServiceHandle("127.0.0.1:7070", ServiceTokens().of, Path("run"), Path("model"), 0.0, memory)
    _print_attach(handle, load_config(), as_json=False)
    said = capsys.readouterr().out
    assert all(part in said for part in ("4 versions", "65 GB", "260 GB", "512 GB"))
