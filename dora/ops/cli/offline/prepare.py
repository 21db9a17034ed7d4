"""``dora prepare``"""

from pathlib import Path
from typing import Annotated

import typer

from dora.ops.cli import completion
from dora.ops.cli.options import JsonOption
from dora.ops.cli.output import print_json, stdout

EXAMPLE = "dora prepare smollm2"


def prepare(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=completion.models,
            help="smollm2, tiny, tiny-moe, tiny-hybrid, or a Hugging Face folder.",
        ),
    ],
    cache: Annotated[Path | None, typer.Option(help="Folder for prepared models; default: the user's cache.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Create the model's Hugging Face folder in the cache from installed packages. Nothing is downloaded."""
    from dora.models import resolve_model

    folder = resolve_model(model, cache)
    if as_json:
        print_json({"model": model, "folder": str(folder)})
    else:
        stdout().print(str(folder), soft_wrap=True)
