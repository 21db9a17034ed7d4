"""The code in the documents, for tests that run it as it is printed."""

import re
from pathlib import Path

import dora

ROOT = Path(dora.__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^    (dora .*)$", re.MULTILINE)


def documents() -> list[Path]:
    """Every page of the repository."""
    top = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")]
    folders = [ROOT / name for name in ("deploy", "docs", "dora", "examples", "experiments")]
    return [*top, *sorted(file for folder in folders for file in folder.rglob("*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return [body for kind, body in FENCE.findall(document.read_text(encoding="utf-8")) if kind == language]


def snippet(document: str, marker: str, language: str = "python") -> str:
    """The one block of ``document`` that contains ``marker``."""
    (found,) = [block for block in blocks(ROOT / document, language) if marker in block]
    return found


def commands(document: Path) -> list[str]:
    """The lines of a document that begin with ``dora``, in blocks of shell or indented; a line that goes on is one."""
    text = document.read_text(encoding="utf-8")
    shell = "\n".join(body for kind, body in FENCE.findall(text) if kind in ("sh", "")).replace("\\\n", " ")
    lines = [line.removeprefix(".venv/bin/") for line in shell.splitlines()]
    lines = [re.sub(r"^([A-Z_]+=\S* )+", "", line) for line in lines]
    return [line for line in [*lines, *INDENTED.findall(text)] if line.startswith("dora ")]
