"""A host with a store and a relay, as the one process of a network namespace: words come and go as lines of JSON."""

import json
import sys
import threading
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import Popen
from typing import Any, Final

from dora.relay.link import Link
from dora.relay.orders import Arrived, FetchFailed, FetchOrder, Upstream
from tests.contract.relay_process import ENDED, Running, Service, run
from tests.hosts import Hosts, address_of

KINDS: Final = {each.__name__: each for each in (FetchOrder, Arrived, FetchFailed)}


class Lines:
    """The messages of a host, by its stdin and stdout."""

    def send(self, words: Any) -> None:
        sys.stdout.write(line(words))
        sys.stdout.flush()

    def recv(self) -> Any:
        return words_of(sys.stdin.readline() or '["end"]')


def line(words: Any) -> str:
    return json.dumps(list(words), default=_plain) + "\n"


def words_of(text: str) -> tuple[Any, ...]:
    return tuple(_found(each) for each in json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return {"kind": type(value).__name__, **asdict(value)}


def _found(value: Any) -> Any:
    if not isinstance(value, dict) or "kind" not in value:
        return value
    fields = {name: found for name, found in value.items() if name != "kind"}
    if value["kind"] == FetchOrder.__name__:
        fields["upstreams"] = tuple(Upstream(**each) for each in fields["upstreams"])
    if fields.get("link"):
        fields["link"] = Link(**fields["link"])
    if "culprits" in fields:
        fields["culprits"] = tuple(fields["culprits"])
    return KINDS[value["kind"]](**fields)


class Apart(Service):
    """The service's part for hosts that are network namespaces."""

    def __init__(self, folder: Path, model: Path, hosts: Hosts) -> None:
        super().__init__(folder, model)
        self._namespaces = hosts

    def _started(self, told: Connection, host: str, epoch: int, dies: tuple[str, float]) -> Running:
        number = int(host.removeprefix("h"))
        argv = [sys.executable, "-m", "tests.e2e.relay_host", str(self._folder / host), str(self._model), host]
        process = self._namespaces.start(number, [*argv, str(epoch), address_of(number), dies[0], str(dies[1])])
        return _Bridge(process, told)


class _Bridge:
    """Carries words between a namespace's process and the pipe that the service reads."""

    def __init__(self, process: "Popen[str]", told: Connection) -> None:
        self._process, self._told = process, told
        threading.Thread(target=self._out, daemon=True).start()
        threading.Thread(target=self._in, daemon=True).start()

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> None:
        self._process.wait()

    def _out(self) -> None:
        assert self._process.stdout is not None
        try:
            for text in self._process.stdout:
                self._told.send(words_of(text))
            self._told.send(ENDED)
        except OSError:
            return  # the service has closed its end

    def _in(self) -> None:
        assert self._process.stdin is not None
        try:
            while True:
                self._process.stdin.write(line(self._told.recv()))
                self._process.stdin.flush()
        except (EOFError, OSError):
            return  # one of the two has ended


if __name__ == "__main__":
    store, model, name, epoch, address, phase, share = sys.argv[1:]
    run(Lines(), Path(store), Path(model), name, int(epoch), (phase, float(share)), address)
