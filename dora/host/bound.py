"""``python -m dora.host.bound PARENT ARGUMENT...``: becomes the Python process of the arguments and ends with PARENT.

The system kills it when the process PARENT ends for any reason (prctl(2), PR_SET_PDEATHSIG).
"""

import os
import sys

from dora.system.process_tree import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
