"""The command line. ``main`` is the entry point of the ``dora`` command; importing it loads no torch and no vLLM."""


def main() -> None:
    """Runs the command line of this process and exits with its code (:mod:`dora.cli.exits`)."""
    from dora.cli.app import app

    app()
