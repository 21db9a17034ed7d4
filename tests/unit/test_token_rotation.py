"""Tokens are replaced while a service runs: the file is read again, and those before are valid for the overlap."""

import os
from pathlib import Path

import pytest

from dora.client import Operator
from dora.errors import DoraError, InvalidValue
from dora.orchestrator.rotation import with_token
from dora.rpc.errors import Unauthenticated
from dora.rpc.roles import Role, ServiceTokens, TokenGeneration
from tests.owner_token import owner_token
from tests.proofs import caller_of
from tests.refusals import refused
from tests.service import configured, running

OVERLAP_S = 10.0


def written(file: Path, token: str, mode: int = 0o600) -> Path:
    new = file.with_suffix(".new")
    new.write_text(token + "\n")
    new.chmod(mode)
    os.replace(new, file)
    return file


def test_earlier_tokens_are_valid_for_the_overlap() -> None:
    now_s = 0.0
    tokens = ServiceTokens(owner_token("first"), lambda: now_s)
    first, started = tokens.of, tokens.started("w0")
    tokens.replace(TokenGeneration.following(owner_token("second")), OVERLAP_S)
    for of in (first, tokens.of):
        for role, token in of.items():
            found = caller_of(tokens, token)
            assert found is not None and found.role is role
    now_s = OVERLAP_S
    assert not any(caller_of(tokens, token) for token in first.values())
    assert all(caller_of(tokens, token) for token in tokens.of.values())
    assert caller_of(tokens, started, "w0")  # it follows from no owner's
    for number in range(9):
        tokens.replace(TokenGeneration.following(owner_token(f"token {number}")), OVERLAP_S)
    assert [bool(caller_of(tokens, owner_token(f"token {number}"))) for number in range(9)] == [False] * 4 + [True] * 5


def test_a_file_gives_the_token_of_a_start(tmp_path: Path, tiny_dense: Path) -> None:
    file = written(tmp_path / "token", "correct-horse")
    config = configured(tiny_dense, service__token_file=str(file))
    assert with_token(config).service.token == "correct-horse"
    written(file, "correct-horse", 0o644)
    with refused(InvalidValue, field="--token-file", names=(str(file), "0644")):
        with_token(config)


async def test_a_service_and_its_clients_follow_their_files(tmp_path: Path, tiny_dense: Path) -> None:
    file = written(tmp_path / "token", owner_token("first"))
    fields = {"workers__count": 0, "service__token_file": str(file), "service__token_overlap_s": 1.0}
    config = configured(tiny_dense, workers__engine="fake", service__state=str(tmp_path / "state"), **fields)
    async with (
        running(config) as handle,
        Operator(handle.address, file) as follows,
        Operator(handle.address, owner_token("first")) as stays,
    ):
        await follows.status()
        await stays.status()
        written(file, "unusable", 0o644)
        written(file, owner_token("second"))
        operator = ServiceTokens(owner_token("second")).of[Role.OPERATOR]
        while True:  # until the service has read it
            try:
                async with Operator(handle.address, operator) as new:
                    await new.status()
                break
            except Unauthenticated:
                continue
        await stays.status()
        with pytest.raises(DoraError):
            while True:
                await stays.status()
        await follows.status()
    assert owner_token("second") in (tmp_path / "state" / "service.json").read_text()
