"""``python -m dora.models MODEL [CACHE]``: prepares a model in a process of its own and prints its folder.

A service that must not load torch can prepare a model this way. On failure the last line of stderr says what is
allowed, and the exit code is 2.
"""

import sys
from pathlib import Path

from dora.errors import InvalidValue
from dora.models import resolve_model, unwritable_cache


def main(arguments: list[str]) -> int:
    try:
        folder = resolve_model(arguments[0], Path(arguments[1]) if len(arguments) > 1 else None)
    except InvalidValue as error:
        print(error.allowed, file=sys.stderr)
        return 2
    except OSError as error:
        print(unwritable_cache(error), file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
