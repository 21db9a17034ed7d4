"""Lowers the priority of relays: their threads use spare CPU time, and their rate leaves bandwidth to others.

A worker that decodes has its own process; a relay could only take core time and the host's link from it.
"""

import contextlib
import os
import threading
from typing import Final

NICE: Final = 15  # of 19: on a busy core a thread gets about 3% of the time, which is enough to bring a version


def stand_back() -> None:
    """Gives the calling thread a low priority, if the system has priorities for threads."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
