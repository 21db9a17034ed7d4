"""``dora version``"""

import platform

import dora
from dora.cli.options import JsonOption
from dora.cli.output import print_json, stdout

EXAMPLE = "dora version"


def version(as_json: JsonOption = False) -> None:
    """Print DORA's version and Python's."""
    if as_json:
        print_json({"dora": dora.__version__, "python": platform.python_version()})
    else:
        stdout().print(f"dora {dora.__version__} (Python {platform.python_version()})")
