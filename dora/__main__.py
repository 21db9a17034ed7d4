"""``python -m dora`` is ``dora``."""

from dora.cli import main

if __name__ == "__main__":
    main()
