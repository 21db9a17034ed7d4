"""The command line. ``main`` is the entry point of the ``dora`` command. Importing it loads neither torch nor vLLM."""

import os
import sys


def main() -> None:
    """Runs the command line and exits the process with its code (:mod:`dora.ops.cli.exits`)."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # commands report connection errors themselves
    try:
        from dora.ops.cli.app import app

        app()
    except KeyboardInterrupt:  # while it loads
        sys.stderr.write("dora: interrupted\n")
        sys.exit(130)
