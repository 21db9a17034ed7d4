"""``dora version``"""

import platform

import dora
from dora.ops.cli.options import JsonOption
from dora.ops.cli.output import print_result

EXAMPLE = "dora version"


def version(as_json: JsonOption = False) -> None:
    """Print DORA's version and Python's."""
    python = platform.python_version()
    print_result({"dora": dora.__version__, "python": python}, f"dora {dora.__version__} (Python {python})", as_json)
