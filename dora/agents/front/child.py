"""The front of `dora serve --http`: a process that ends with the service, and begins again if it dies."""

from pathlib import Path

from dora.agents.front.listening import INHERITED, listening_socket, url_of
from dora.host.supervised import SupervisedProcess
from dora.system.environment import PAGE_TOKEN, child_environment
from dora.system.secret_file import read_token
from dora.tls import Tls
from dora.tls.options import CLIENTS


class FrontProcess:
    """Runs a front from ``start`` to ``stop``.

    This process has the listening socket, so agents that come while the front is started again only wait.
    """

    def __init__(self, listen: str, key_file: Path | None = None, tls: Tls | None = None, clients: str = "") -> None:
        """``tls`` is the service's, None if that is not encrypted. ``clients`` says what its clients show.

        Raises InvalidValue for an address that is not free, or that others reach while any key will do, or that the
        certificate does not name.
        """
        if key_file is not None:
            read_token(key_file, "--http-key-file")
        has_key = key_file is not None or (tls is not None and clients == CLIENTS[0])
        self._listening = listening_socket(listen, has_key=has_key)
        self._key_file = key_file
        self._tls = tls
        self._clients = clients
        self._process: SupervisedProcess | None = None

    @property
    def url(self) -> str:
        return url_of(self._listening, secure=self._tls is not None)

    def start(self, service: str, token: str, model: Path, page_token: str = "") -> None:
        """Starts it at a service on this host. ``token`` is of the role environment, ``page_token`` of metrics."""
        options: dict[str, object] = {"--service": service, "--http": f"{INHERITED}{self._listening.fileno()}"}
        options["--model"] = model
        if self._key_file is not None:
            options["--key-file"] = self._key_file
        if self._tls is not None:
            options["--tls-clients"] = self._clients
        words = [str(word) for option in options.items() for word in option]
        argv = ["-m", "dora", "front", *words]
        files = {} if self._tls is None else self._tls.environment()
        environment = child_environment((), {"DORA_TOKEN": token, PAGE_TOKEN: page_token, **files})
        self._process = SupervisedProcess("the front", argv, environment, (self._listening.fileno(),))

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()
        self.close()

    def close(self) -> None:
        self._listening.close()
