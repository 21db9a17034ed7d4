"""Processes below one that adopts orphans: none is left, however quickly they hand over to one another."""

import subprocess
import sys

ENDS_A_CHAIN = """
import os
from dora.system.process_tree import adopt_orphans, descendants, end_descendants

adopt_orphans()
if not os.fork():
    for _ in range(300):
        if os.fork():
            os._exit(0)
        os.setsid()
    os.execvp("sleep", ["sleep", "100"])
end_descendants()
assert not descendants(ended_too=True)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("none is left")
"""


def test_a_chain_of_processes_that_start_the_next_one_and_end_is_ended() -> None:
    ran = subprocess.run([sys.executable, "-c", ENDS_A_CHAIN], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "none is left\n", ran.stderr
