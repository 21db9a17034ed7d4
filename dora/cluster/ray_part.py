"""One part of a run on Ray, the service or a host: an actor that keeps `dora serve` or `dora host` running.

    Ray loses the actor or its node ──▶ starts the actor again, on another node if need be
    Ray drains the node             ──▶ `dora drain HOST --within S`; the actor waits for the node's end
    release                         ──▶ the child gets SIGTERM; then the service's actor removes this one and its group

A child that ends is started again, unless it refuses its settings. It ends with the actor in any case.
"""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dora.cluster.adapter import HOST, SERVICE, Job
from dora.cluster.ray_calls import actor_of, drained_by_s, group_of, remove
from dora.cluster.ray_order import Order, State, command_of
from dora.errors import InvalidValue
from dora.host.last_words import reason_in
from dora.host.placement import gpus, visible
from dora.release import __version__
from dora.system.environment import HANDED, handed, without_secrets

USAGE: Final = 2  # the exit code of a command that refuses a setting
PAUSE_S: Final = 1.0  # between two starts, and two looks at draining nodes
CALL_S: Final = 10.0  # an answer of another actor may take
LINES_KEPT: Final = 50


class Part:
    """The actor's class. Its methods do not wait, but for ``drain``."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._ip = get_node_ip_address()
        self._node = ray.get_runtime_context().get_node_id()
        self._state, self._reason = State.STARTING, ""
        self._has_run = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._deadline_s = 0.0
        self._child: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)  # the child's last ones
        self._leaves, self._is_released = threading.Event(), threading.Event()
        for work in (self._run, self._watch):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def report(self) -> Job:
        state, reason = self._state, self._reason
        if self._is_released.is_set() and state != State.ENDED:
            state = State.RELEASED
        elif self._leaves.is_set() and state not in (State.ENDED, State.REFUSED):
            left = f" in {max(0.0, self._deadline_s - time.time()):.0f} s" if self._deadline_s else ""
            state, reason = State.DRAINING, f"its node goes{left}"
        machine = f"{self._ip}:{self._order.table.port}" if self._order.part == SERVICE else self._ip
        return Job(self._order.name, self._order.part, state, machine, reason)

    def release(self) -> None:
        """Ends the part for good. A host's actor is removed then; `Cluster.down` removes the service's."""
        self._is_released.set()
        self._leave()

    def remove(self, name: str) -> None:
        remove(self._order.run, name)

    def drain(self, name: str, within_s: float) -> bool:
        """Tells the service, whose actor this is, that a host's node goes. Returns whether it has taken the notice."""
        address = f"{self._ip}:{self._order.table.port}"
        told = [sys.executable, "-m", "dora", "drain", name, "--within", f"{within_s:.0f}", "--address", address]
        secrets = handed({"DORA_TOKEN": self._order.token})
        with os.fdopen(secrets), suppress(subprocess.TimeoutExpired):
            env = {**without_secrets(), HANDED: str(secrets)}
            return not subprocess.run(told, env=env, pass_fds=(secrets,), timeout=CALL_S, check=False).returncode
        return False

    # -------------------------------------------------------------------------------------------------------- threads

    def _run(self) -> None:
        try:
            self._check()
            while not self._leaves.is_set():
                if (command := self._command()) and not self._kept(command):
                    self._state = State.REFUSED
                    break
                self._leaves.wait(PAUSE_S)
        except InvalidValue as error:
            self._state, self._reason = State.REFUSED, str(error)
        except OSError as error:
            self._state, self._reason = State.REFUSED, f"{self._order.folder or sys.executable}: {error.strerror}"
        self._is_released.wait()
        self._state = State.ENDED
        if self._order.part == HOST and (service := actor_of(self._order.run, SERVICE)) is not None:
            service.remove.remote(self._order.name)  # without a service, `Cluster.down` does it

    def _watch(self) -> None:
        while not self._leaves.is_set():
            with suppress(RayError):
                if (deadline_s := drained_by_s(self._node)) is not None:
                    self._deadline_s = deadline_s
                    self._leaves.set()
                    if not self._is_drained(max(1.0, deadline_s - time.time())):
                        self._leave()
            time.sleep(PAUSE_S)

    def _is_drained(self, within_s: float) -> bool:
        """Returns whether the service empties this host by then."""
        service = actor_of(self._order.run, SERVICE) if self._order.part == HOST else None
        with suppress(RayError):
            return service is not None and bool(
                ray.get(service.drain.remote(self._order.name, within_s), timeout=2 * CALL_S)
            )
        return False

    def _leave(self) -> None:
        self._leaves.set()
        if (child := self._child) is not None:
            child.terminate()

    def _check(self) -> None:
        """Raises InvalidValue if the part cannot run on this node. The service's files are written here."""
        order = self._order
        if order.version != __version__:
            allowed = f"that of the other nodes, {order.version}: install it on {self._ip}"
            raise InvalidValue("version", __version__, allowed)
        if order.part == HOST and (asked := order.table.gpus):
            found = 0
            with suppress(InvalidValue):  # Ray was told of GPUs that are not there
                found = len(visible(gpus()))
            if found < asked:
                raise InvalidValue("ray.gpus", asked, f"at most {found}: the GPUs that {self._ip} has for it")
        if order.part == SERVICE:
            file = Path(order.folder) / "run.toml"
            if self._has_run and not file.exists():
                allowed = f"on storage of all nodes: the service moved to {self._ip}, and its state is not there"
                raise InvalidValue("ray.folder", order.folder, allowed)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_text(order.config, encoding="utf-8")

    def _command(self) -> list[str]:
        """Returns the child's arguments, or none while the service's address is not known."""
        order = self._order
        if order.part == SERVICE:
            return command_of(order, f"{self._ip}:{order.table.port}")
        if (service := actor_of(order.run, SERVICE)) is not None:
            with suppress(RayError):  # it is being started, perhaps on another node
                return command_of(order, ray.get(service.report.remote(), timeout=CALL_S).machine)
        return []

    def _kept(self, command: list[str]) -> bool:
        """Runs the child until it ends. Returns whether to start it again: it has run, and refuses no setting."""
        self._lines.clear()
        self._state = State.STARTING
        if self._order.part == HOST:
            self._runs()
        secrets = handed({"DORA_TOKEN": self._order.token})
        with os.fdopen(secrets):
            child = subprocess.Popen(
                [sys.executable, "-m", "dora.host.bound", str(os.getpid()), "-m", "dora", *command],
                env={**without_secrets(), HANDED: str(secrets)},
                cwd=folder if (folder := self._order.working_folder) and os.path.isdir(folder) else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=(secrets,),
                start_new_session=True,
            )
        assert child.stdout is not None and child.stderr is not None
        self._child = child
        if self._leaves.is_set():
            child.terminate()
        saying = threading.Thread(target=self._passed_on, args=(child.stderr,), daemon=True)
        saying.start()
        for _ in child.stdout:  # the service states its address and tokens, which are not for a log
            self._runs()
        code = child.wait()
        saying.join()
        self._reason = f"ended with {code}: {reason_in(''.join(self._lines))}"
        return self._leaves.is_set() or (code != USAGE and self._has_run)

    def _runs(self) -> None:
        self._state, self._has_run = State.RUNNING, True

    def _passed_on(self, lines: IO[str]) -> None:
        """Passes the child's lines on to this actor's log."""
        for line in lines:
            self._lines.append(line)
            sys.stderr.write(line)
            sys.stderr.flush()


def start(order: Order, bundle: Mapping[str, float], lifetime: str | None) -> Any:
    """Starts a part in a group of its own, once a node has room. Returns the actor, which lives on if ``detached``, and
    otherwise as long as this process.
    """
    group = placement_group([dict(bundle)], name=group_of(order.run, order.name), lifetime=lifetime)
    options = {
        "name": order.name,
        "namespace": order.run,
        "lifetime": lifetime,
        "max_restarts": -1,
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
    }
    return ray.remote(Part).options(**options).remote(order)
