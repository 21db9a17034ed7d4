"""The front of `dora serve --http`: a process that ends with the service, and begins again if it dies."""

from pathlib import Path

from dora.front.listening import INHERITED, listening_socket, url_of
from dora.host.kept import KeptProcess
from dora.system.environment import child_environment
from dora.system.secret_file import read_token


class FrontProcess:
    """Runs a front from ``start`` to ``stop``.

    This process has the listening socket, so agents that come while the front is started again only wait.
    """

    def __init__(self, listen: str, key_file: Path | None = None) -> None:
        """Raises InvalidValue for an address that is not free, or that others reach while any key will do."""
        if key_file is not None:
            read_token(key_file, "--http-key-file")
        self._listening = listening_socket(listen, has_key=key_file is not None)
        self._key_file = key_file
        self._process: KeptProcess | None = None

    @property
    def url(self) -> str:
        return url_of(self._listening)

    def start(self, service: str, token: str, model: Path) -> None:
        """Starts it at a service whose model's folder is on this host. ``token``: of the role environment."""
        options: dict[str, object] = {"--service": service, "--http": f"{INHERITED}{self._listening.fileno()}"}
        options["--model"] = model
        if self._key_file is not None:
            options["--key-file"] = self._key_file
        words = [str(word) for option in options.items() for word in option]
        argv = ["-m", "dora", "front", *words]
        environment = child_environment(("DORA_TLS*",), {"DORA_TOKEN": token})
        self._process = KeptProcess("the front", argv, environment, (self._listening.fileno(),))

    async def stop(self) -> None:
        """Ends the process, if it was started."""
        if self._process is not None:
            await self._process.stop()
        self.close()

    def close(self) -> None:
        """Frees the address."""
        self._listening.close()
