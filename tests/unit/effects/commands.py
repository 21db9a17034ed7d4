"""Rows of options: what a command does with and without one, in this process."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from dora.config import Config, value_at
from dora.ops.cli import serve
from dora.ops.cli.app import app
from tests.unit.effects.rows import Shown


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a command."""

    code: int
    out: str
    said: str  # on stderr
    files: Sequence[str]  # in the folder, by relative path

    @property
    def tree(self) -> Any:
        """The document that it printed; None if it printed none."""
        try:
            found = json.loads(self.out)
        except ValueError:
            return None
        return found if isinstance(found, dict | list) else None

    def at(self, field: str) -> Any:
        return value_at(self.tree or {}, field)


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs commands in a folder. ``words``: returns the text for ``{name}`` in an argument."""

    folder: Path
    words: Callable[[str], str]
    monkeypatch: pytest.MonkeyPatch

    def run(self, arguments: Sequence[str]) -> Done:
        filled = [re.sub(r"\{(\w+)\}", lambda found: self.words(found[1]), each) for each in arguments]
        done = CliRunner().invoke(app, filled)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        files = sorted(str(each.relative_to(self.folder)) for each in self.folder.rglob("*") if each.is_file())
        return Done(done.exit_code, done.stdout, done.stderr, files)


Shows = Callable[[Done], object]
_RUN: Final[dict[tuple[str, ...], Done]] = {}


def _nothing(_bench: Bench) -> None: ...


@dataclass(frozen=True, slots=True)
class Ran:
    """The command is run with ``base``, then with ``given`` too, in folders of their own. ``shows`` holds only then.

    If there is no ``shows``, the result differs, and the command succeeds. ``before`` prepares both.
    """

    base: Sequence[str]
    given: Sequence[str]
    shows: Shows | None = None
    before: Callable[[Bench], None] = _nothing

    def check(self, option: str, bench: Callable[[str], Bench]) -> None:
        without, with_it = self._run(bench("without"), ()), self._run(bench("with"), self.given)
        if self.shows is None:
            assert with_it.code == 0, with_it
            assert _result(without) != _result(with_it), f"{option} changes no result: {without}"
        else:
            assert self.shows(with_it), with_it
            assert not self.shows(without), without

    def _run(self, bench: Bench, more: Sequence[str]) -> Done:
        """Many rows have one base, which is run once if it uses nothing of its own."""
        arguments = (*self.base, *more)
        if arguments in _RUN:
            return _RUN[arguments]
        self.before(bench)
        done = bench.run(arguments)
        if self.before is _nothing and not more and "{" not in "".join(arguments):
            _RUN[arguments] = done
        return done


@dataclass(frozen=True, slots=True)
class Sets:
    """The option sets a setting of ``dora serve``, which has a row of its own."""

    setting: str
    given: Sequence[str]
    value: Any

    def check(self, option: str, bench: Callable[[str], Bench]) -> None:
        seen: list[Any] = []
        for name, more in (("without", ()), ("with", self.given)):
            one = bench(name)

            async def noted(config: Config, _as_json: bool, _front: object) -> int:
                seen.append(value_at(config.model_dump(), self.setting))
                return 0

            one.monkeypatch.setattr(serve, "_serve", noted)
            assert one.run(["serve", "--model", "{dense}", *more]).code == 0
        assert seen[1] == self.value != seen[0], f"{option}: {seen}"


OptionRow = Ran | Sets | Shown
# of documents: what repeats the command line, and real time
_NO_RESULT: Final = {
    *("model", "rollout_hardware", "train_hardware", "slots", "cost", "train_s_at", "preset", "policy", "window"),
    *("predictor", "seed", "steps", "warmup", "settings", "split", "replay", "wall_s", "sim_speedup"),
}


def _result(done: Done) -> object:
    tree = done.tree
    if isinstance(tree, dict):
        return {key: value for key, value in tree.items() if key not in _NO_RESULT}
    return done
