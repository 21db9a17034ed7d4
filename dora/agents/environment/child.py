"""The environment of ``dora serve --environment``: a process that ends with it, and is started again."""

from collections.abc import Sequence
from pathlib import Path

from dora.agents.environment.loading import check_loads
from dora.config import EnvironmentConfig
from dora.host.supervised import SupervisedProcess
from dora.system.environment import child_environment
from dora.tls import Tls


class EnvironmentProcess:
    def __init__(self, settings: EnvironmentConfig, passed: Sequence[str] = (), tls: Tls | None = None) -> None:
        """It gets the variables ``passed`` from here. ``tls`` is the service's; None if that is not encrypted.

        Raises InvalidValue if the class does not load.
        """
        self._settings = settings
        self._environment = child_environment(tuple(passed), {} if tls is None else tls.environment())
        check_loads(settings, self._environment)
        self._process: SupervisedProcess | None = None

    def start(self, service: str, token: str, model: Path, log: Path | None = None) -> None:
        """Starts it with a token of the role environment. Its output goes to ``log``, or to this process's stderr."""
        words = [f"environment.{name}={value}" for name, value in self._settings if name != "spec"]
        sets = [word for each in words for word in ("--set", each)]
        argv = ["-m", "dora", "environment", self._settings.spec, "--service", service, "--model", str(model), *sets]
        environment = {**self._environment, "DORA_TOKEN": token}
        self._process = SupervisedProcess("the environment", argv, environment, log=log)

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()
