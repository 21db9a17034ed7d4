"""Launchers by name. ``workers.launcher`` chooses one; a package adds one by an entry point:

[project.entry-points."dora.launchers"]
slurm = "my_package.slurm:SlurmLauncher"    # called with the arguments of dora.host.processes.Processes
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final

from dora.errors import InvalidValue, described, one_of
from dora.host.launcher import OwnLauncher
from dora.host.processes import Processes

GROUP: Final = "dora.launchers"
SETTING: Final = "workers.launcher"
PROCESSES: Final = "processes"  # on the service's own machine


def launcher_named(name: str) -> Callable[..., OwnLauncher]:
    """Returns the launcher's constructor. Raises InvalidValue for an unknown name or an entry point that fails."""
    if name == PROCESSES:
        return Processes
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise InvalidValue(SETTING, name, one_of(name, [PROCESSES, *sorted(points)]))
    try:
        launcher: Callable[..., OwnLauncher] = points[name].load()
    except Exception as error:  # third-party modules may raise anything
        raise InvalidValue(SETTING, name, f"an importable entry point ({described(error)})") from error
    return launcher
