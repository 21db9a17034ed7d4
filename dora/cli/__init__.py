"""The command line. ``main`` is the entry point of the ``dora`` command; importing it loads no torch and no vLLM."""

import os


def main() -> None:
    """Runs the command line of this process and exits with its code (:mod:`dora.cli.exits`)."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what gRPC logs by itself, a command says in a line of its own
    from dora.cli.app import app

    app()
