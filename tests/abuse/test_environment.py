"""The surroundings of a service: homes that cannot be written, proxies, addresses."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from dora.ops.stored_token import find_token, left_token, token_folder
from dora.rpc.channel import is_loopback, open_channel


def test_the_token_is_left_elsewhere_where_no_home_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with left_token("127.0.0.1:7070", "secret") as file:
        assert file is not None and file.parent.parent == tmp_path / "tmp"
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert find_token("127.0.0.1:7070") == "secret"
        file.parent.chmod(0o755)  # as somebody else might have prepared it
        assert find_token("127.0.0.1:7070") == ""
        file.parent.chmod(0o700)
    assert find_token("127.0.0.1:7070") == ""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    assert token_folder() is None
    with left_token("127.0.0.1:7070", "secret") as nowhere:
        assert nowhere is None


async def test_no_proxy_stands_between_this_host_and_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")

    class Echo(grpc.GenericRpcHandler):
        def service(self, _details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(echo)

    async def echo(request: bytes, _context: Any) -> bytes:
        return request

    server.add_generic_rpc_handlers((Echo(),))
    await server.start()
    try:
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("no_grpc_proxy", raising=False)
        for host in ("127.0.0.1", "localhost"):
            async with open_channel(f"{host}:{port}") as channel:
                assert await channel.unary_unary("/echo/echo")(b"here", timeout=10) == b"here"
    finally:
        await server.stop(None)


def test_which_hosts_are_this_one() -> None:
    assert all(
        map(is_loopback, ("127.0.0.1", "127.8.9.1", "localhost", "[::1]", "::1", "0.0.0.0", "[::ffff:127.0.0.1]"))
    )
    assert not any(map(is_loopback, ("10.0.0.1", "example.org", "[2001:db8::1]", "")))
