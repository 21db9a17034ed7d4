"""Relays stand back: their threads take the time that others leave, and their bytes a rate that leaves room.

A worker that decodes has its own process; what a relay could take from it is time on a core, and the host's link.
"""

import contextlib
import os
import threading
from typing import Final

NICE: Final = 15  # of 19: on a core that others want too it gets 3% of the time, which still brings a version across


def stand_back() -> None:
    """From here on the calling thread has a low priority. A system that has none for threads is left as it is."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
