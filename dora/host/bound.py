"""``python -m dora.host.bound PARENT ARGUMENT...``: becomes the Python that the arguments say, and ends with PARENT.

The system kills it once the process PARENT has ended, however that ends (prctl(2), PR_SET_PDEATHSIG).
"""

import os
import sys

from dora.system.process_tree import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
