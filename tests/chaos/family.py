"""The processes that others of a run have started, found by whose children they are; 0 where there is none now."""

import contextlib

import psutil


def supervisor(service: int) -> int:
    """Returns the process id of the supervisor of the service's reward function."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(service).children():
            if "dora.rewards.supervisor" in child.cmdline():
                return child.pid
    return 0


def verifier(service: int) -> int:
    """The process that runs the service's reward function."""
    with contextlib.suppress(psutil.Error):
        parent = supervisor(service)
        for child in psutil.Process(parent).children() if parent else ():
            return child.pid
    return 0


def rank(worker: int) -> int:
    """One of a worker's processes for its ranks."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(worker).children():
            if "resource_tracker" not in " ".join(child.cmdline()):
                return child.pid
    return 0
