"""Modules that a process loads, and those that the pure core may use. lint-imports checks the other rules."""

import ast
import subprocess
import sys
from pathlib import Path

import dora

ROOT = Path(dora.__file__).parent
CORE = ROOT / "core"
CORE_MAY_IMPORT = ("dora.data.types", "dora.config", "dora.errors", "dora.data.limits", "dora.data.growth", "dora.core")
IMPURE = {"asyncio", "datetime", "io", "logging", "os", "pathlib", "random", "secrets", "socket", "subprocess", "sys",
          "tempfile", "threading", "time", "uuid"}  # fmt: skip
HEAVY = ("torch", "transformers", "vllm")
LIGHT = (
    "dora",
    "dora.ops.cli",
    "dora.client",
    "dora.models",
    "dora.core.machine",
    "dora.orchestrator.main",
    "dora.prompts",
    "dora.rewards",
    "dora.sync",
)


def imported_names(file: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add(node.module or "")
    return names


def test_dora_its_cli_and_its_core_load_neither_torch_nor_vllm() -> None:
    script = f"import sys, {', '.join(LIGHT)}; print(*(name for name in {HEAVY} if name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == []


def test_importing_dora_alone_loads_nothing_else_and_its_names_are_there() -> None:
    script = (
        "import sys; before = set(sys.modules); import dora; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)); "
        "print(*(getattr(dora, name) is not None for name in dora.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["dora", *["True"] * len(dora.__all__)]
    assert {"Prompt", "Prompts", "Trainer", "sync"} <= set(dora.__all__)


def test_the_core_imports_no_clock_no_randomness_no_io() -> None:
    files = sorted(CORE.rglob("*.py"))
    assert files
    for file in files:
        impure = {name for name in imported_names(file) if name.partition(".")[0] in IMPURE}
        assert not impure, f"{file.relative_to(ROOT)} imports {sorted(impure)}"


def test_the_core_imports_only_types_config_and_errors_of_dora() -> None:
    for file in sorted(CORE.rglob("*.py")):
        for name in imported_names(file):
            inside = not name.startswith("dora") or name.startswith(CORE_MAY_IMPORT)
            assert inside, f"{file.relative_to(ROOT)} imports {name}"
