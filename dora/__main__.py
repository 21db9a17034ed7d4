"""``python -m dora`` is ``dora``."""

from dora.ops.cli import main

if __name__ == "__main__":
    main()
