"""Exports a model folder's tokenizer as transformers loads it, to a form that does not need transformers.

Only transformers knows the meaning of the folder's files: it picks a class by config.json and tokenizer_config.json,
may rebuild the tokenizer, and adds tokens and templates from further files. It therefore reads the folder once, in a
process of its own and without torch. The service uses the result, which is cached by the files' content.

    python -m dora.prompts.export FOLDER MADE
"""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from blake3 import blake3
from tokenizers import Tokenizer

from dora.errors import InvalidValue
from dora.models.prepared import prepare_once
from dora.system.environment import child_environment

RECIPE: Final = 2
KEPT_MAX: Final = 16  # exported tokenizers in a cache; the least recently used are deleted
EXPORT_TIMEOUT_S: Final = 300.0
TOKENIZER_FILE: Final = "tokenizer.json"
_REST_FILE: Final = "rest.json"
# suffixes of files that transformers may read
_READ: Final = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
_PACKAGES: Final = ("transformers", "tokenizers")


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """The data needed to tokenize texts and chats."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]  # names as in chat templates: "bos_token" and so on
    chat_template: str | None  # None: no template for chats without tools


def exported(folder: Path, cache: Path) -> Exported:
    """Returns a model folder's tokenizer as transformers loads it; without transformers, from tokenizer.json.

    Raises InvalidValue if the folder has no tokenizer, or one that cannot be loaded.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        raise InvalidValue("tokenizer", str(folder), "a folder with tokenizer.json")
    if importlib.util.find_spec("transformers") is None:
        return _without_transformers(folder)
    try:
        made = prepare_once(cache / "tokenizers" / _digest(folder), {"recipe": RECIPE}, lambda made: _run(folder, made))
        result = _read(made)
        with suppress(OSError):  # a read-only cache
            os.utime(made)  # marks it as used: the least recently used are deleted
            _forget_oldest(made.parent)
        return result
    except OSError:  # the cache is not writable or full: continue without it
        pass
    try:
        with tempfile.TemporaryDirectory(prefix="dora-tokenizer-") as passing:
            _run(folder, Path(passing))
            return _read(Path(passing))
    except OSError as error:
        raise InvalidValue(
            "cache", str(cache), f"a writable folder with free space ({error.strerror or error})"
        ) from error


def _digest(folder: Path) -> str:
    packages = {package: version(package) for package in _PACKAGES}
    digest = blake3(json.dumps([str(folder.resolve()), packages, RECIPE]).encode())
    for file in sorted([*folder.iterdir(), *folder.glob("*/*.jinja")]):
        if file.suffix in _READ and file.is_file():
            content = file.read_bytes()
            digest.update(f"{file.relative_to(folder)}/{len(content)}/".encode())
            digest.update(content)
    return digest.hexdigest(length=16)


def _run(folder: Path, made: Path) -> None:
    stated = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUTF8": "1"}
    environment = child_environment(["HF_*"], stated)
    argv = [sys.executable, "-m", "dora.prompts.export", str(folder.resolve()), str(made)]
    try:
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=EXPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        allowed = f"a tokenizer that transformers loads within {EXPORT_TIMEOUT_S:g} s"
        raise InvalidValue("tokenizer", str(folder), allowed) from error
    if done.returncode == os.EX_IOERR:
        raise OSError(f"the exported tokenizer cannot be written to {made}")
    if done.returncode:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise InvalidValue("tokenizer", str(folder), f"a tokenizer that transformers loads ({reason})")


def _read(made: Path) -> Exported:
    rest = json.loads((made / _REST_FILE).read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(made / TOKENIZER_FILE))
    tokenizer.encode_special_tokens = rest["encode_special_tokens"]
    return Exported(tokenizer, rest["special_tokens"], rest["chat_template"])


def _forget_oldest(folder: Path) -> None:
    made = sorted((each.stat().st_mtime, each) for each in folder.iterdir() if not each.name.startswith("."))
    for _, each in made[:-KEPT_MAX]:
        shutil.rmtree(each, ignore_errors=True)


def _without_transformers(folder: Path) -> Exported:
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        file = folder / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except Exception as error:  # the tokenizers library raises only plain Exceptions
        raise InvalidValue("tokenizer", str(folder), f"a folder with a readable tokenizer ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(template, list):  # several named templates
        template = {each["name"]: each["template"] for each in template}.get("default")
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return Exported(tokenizer, {key: each for key, each in contents.items() if isinstance(each, str)}, template)


def export(folder: Path, made: Path) -> None:
    """Writes the tokenizer that transformers loads from ``folder`` to ``made``. Raises the errors of transformers."""
    sys.modules["torch"] = None  # type: ignore[assignment] # to transformers it is not installed: seconds less
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:
        if (folder / "config.json").is_file():
            raise
        loaded = PreTrainedTokenizerFast.from_pretrained(folder)  # no file of the folder names a class
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(loaded).__name__} has no tokenizer of the tokenizers library")
    rest: dict[str, Any] = {
        "special_tokens": dict(loaded.special_tokens_map),
        "encode_special_tokens": bool(backend.encode_special_tokens),
        "chat_template": None,
    }
    templates = loaded.chat_template
    rest["chat_template"] = templates.get("default") if isinstance(templates, dict) else templates
    # Prompts are neither truncated nor padded, regardless of the stored settings, as in transformers by default.
    backend.no_truncation()
    backend.no_padding()
    text = backend.to_str(pretty=True)
    try:
        (made / TOKENIZER_FILE).write_text(text, encoding="utf-8")
        (made / _REST_FILE).write_text(json.dumps(rest), encoding="utf-8")
    except OSError:
        sys.exit(os.EX_IOERR)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
