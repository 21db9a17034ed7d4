"""Writes ``docs/reference/`` from the code: every setting, column, counter and JSON field with its meaning.

Run by ``make docs`` as ``python -m dora.ops.cli.reference docs/reference``. A test compares the folder with its output.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dora.agents.front.app import AGENTS, OWN, SESSION
from dora.agents.front.callers import TURNS
from dora.agents.front.figures import DISTRIBUTIONS as FRONT_DISTRIBUTIONS
from dora.agents.front.figures import FRONT
from dora.agents.front.http import TINKER
from dora.config import Config
from dora.data.conversation import BranchShown, Conversation, TurnShown
from dora.data.counters import COUNTERS
from dora.data.engine_times import HISTOGRAMS
from dora.data.trajectory import MEANINGS as TRAJECTORY
from dora.data.validation import kind_of, limits_of, section_of
from dora.errors import Conflict, DoraError, InvalidValue, LimitExceeded, NotFound, VersionRejected
from dora.lab.sim.faults.fault_kinds import KINDS
from dora.lab.sim.faults.sweep import SweepReport
from dora.lab.sim.figures.report import BrokenReport, Report
from dora.lab.sim.scenario import Scenario
from dora.metrics.declaration import DeclaredMetric
from dora.metrics.distribution import Distribution
from dora.ops.cli import tls
from dora.ops.cli.app import CLUSTER_COMMANDS, COMMANDS
from dora.ops.cli.exits import MEANINGS, exit_code_of
from dora.ops.cli.limits import limits
from dora.ops.cli.offline.simulate import presets, run, sweep
from dora.ops.cli.offline.simulate.presets import PresetRow
from dora.ops.cli.offline.simulate.run import ComparisonTree, Origin
from dora.ops.demo.report import DemoReport
from dora.ops.doctor.service import Finding
from dora.ops.verify import VerifyReport
from dora.ops.view import comparison, plan, service
from dora.ops.view.decisions import ReplayTree
from dora.ops.view.evaluation import EvaluationReport
from dora.ops.view.hosts import HOST_COLUMNS
from dora.ops.view.pools import POOL_COLUMNS
from dora.ops.view.profile import ProfileReport
from dora.ops.view.simulation import LINES, Division
from dora.ops.view.tables import Column, in_a_line
from dora.orchestrator.metrics.of_hosts import HOST, LABELS
from dora.orchestrator.metrics.of_service import SERVICE
from dora.orchestrator.metrics.server import PLACES
from dora.orchestrator.recovery.replay import Known, Summary
from dora.orchestrator.rollout.distributions import DISTRIBUTIONS
from dora.rpc.access import ACCESS, may_call
from dora.rpc.bearer import READS
from dora.rpc.errors import (
    CallFailed,
    NoAnswer,
    PermissionDenied,
    ServiceUnavailable,
    Unauthenticated,
    status_of,
)
from dora.rpc.roles import Role

INTRODUCTION: Final = """\
# Reference

Look up a command, setting, error, counter, metric, column or JSON field here. `make docs` writes these pages from the
code.

Names end in their unit: `_s` seconds, `_min` minutes, `_ms` milliseconds, `_tokens`, `_bytes`; a `_fraction` is 0 to 1.
Null in JSON and `-` in a table mean that a value was not measured or has no meaning there. With `--json`, a command on
a service prints the fields of `dora/rpc/dora.proto`; the others print the fields listed here.
"""
BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
Rows = Iterable[Sequence[object]]
Table = tuple[str, Sequence[str], Rows]  # title, headings and rows
FIELDS: Final = ("field", "meaning")
COLUMNS: Final = ("column", "meaning")
METRICS: Final = ("metric", "kind", "labels", "meaning")
SETTINGS: Final = ("setting", "default", "allowed", "meaning")
ERRORS: Final[tuple[type[DoraError], ...]] = (
    InvalidValue,
    Conflict,
    VersionRejected,
    NotFound,
    LimitExceeded,
    Unauthenticated,
    PermissionDenied,
    ServiceUnavailable,
    NoAnswer,
    CallFailed,
)  # errors that a client of a service can receive


def reference() -> dict[str, str]:
    """Returns the text of each page by its file's name."""
    pages = {f"{name.lower()}.md": (name, list(tables)) for name, tables in _pages().items()}
    index = ((f"[{name}]({file})", "; ".join(title for title, *_ in tables)) for file, (name, tables) in pages.items())
    texts = {file: _page(name, tables) for file, (name, tables) in pages.items()}
    return {"README.md": f"{INTRODUCTION}\n{_table(('page', 'tables'), index)}", **texts}


def _pages() -> dict[str, Iterable[Table]]:
    return {
        "Commands": _command_tables(),
        "Errors": [("Errors", ("error", "gRPC status", "exit code of a command", "meaning"), _errors())],
        "Access": _access_tables(),
        "Settings": _setting_tables(),
        "Limits": [("Limits", ("of", "limit", "beyond it"), limits())],
        "Counters": [("Counters since the start: `dora status`", ("counter", "meaning"), _named(COUNTERS))],
        "Metrics": _metric_tables(),
        "Columns": _column_tables(),
        "Records": _record_tables(),
        "Simulator": _simulator_tables(),
        "Planner": _planner_tables(),
    }


def _command_tables() -> Iterator[Table]:
    yield "Commands", ("command", "what it does", "example"), _commands()
    yield "Exit codes", ("code", "meaning"), ((code.value, text) for code, text in MEANINGS.items())


def _access_tables() -> Iterator[Table]:
    yield "Who may call what", ("method of `dora.proto`", *Role), _access()
    yield "Who may use which route", ("route or page, under TLS", *Role), _routes()


def _setting_tables() -> Iterator[Table]:
    rows: dict[str, list[Sequence[object]]] = {}
    for row in _settings(Config):
        section, has_section, _ = str(row[0]).partition(".")
        rows.setdefault(f"{section}`" if has_section else "Without a section", []).append(row)
    return ((section, SETTINGS, own) for section, own in rows.items())


def _metric_tables() -> Iterator[Table]:
    yield "Metrics of a service: `dora serve --metrics`, page `/metrics`", METRICS, _metrics(SERVICE, DISTRIBUTIONS)
    yield "Metrics of a front: its page `/metrics`", METRICS, _metrics(FRONT, FRONT_DISTRIBUTIONS)
    yield "Metrics of a host: page `/hosts/NAME/metrics`", METRICS, (*_metrics(HOST), *_engine_histograms())


def _column_tables() -> Iterator[Table]:
    yield "Workers: `dora workers`", COLUMNS, _columns([*service.WORKER_COLUMNS, service.RANKS, service.DRAFTS])
    yield "Hosts: `dora hosts`", COLUMNS, _columns(HOST_COLUMNS)
    yield "Pools: `dora pools`", COLUMNS, _columns(POOL_COLUMNS)
    yield "Versions: `dora versions`", COLUMNS, _columns(service.VERSION_COLUMNS)
    yield "Trajectories: `dora trajectories`", COLUMNS, _columns(service.TRAJECTORY_COLUMNS)


def _record_tables() -> Iterator[Table]:
    trajectory = "A trajectory: `dora.data.trajectory.Trajectory`, and a line of `trajectories.jsonl`"
    yield trajectory, FIELDS, _named(TRAJECTORY)
    session = _fields(Conversation, ("branches[].", BranchShown), ("branches[].turns[].", TurnShown))
    yield "A recorded session: `dora trajectories --show`", FIELDS, session
    yield "A record: `dora verify`", FIELDS, (("`ok`", "whether nothing was violated"), *_fields(VerifyReport))
    yield "The demo's `report.json`", FIELDS, _fields(DemoReport)
    log = _fields(ReplayTree, ("decisions[].known.", Known), ("summary.", Summary))
    yield "Evaluations: `dora eval`", FIELDS, _fields(EvaluationReport)
    yield "Event logs: `dora replay`", FIELDS, log
    yield "A service's hosts: `dora doctor --service`, each of `findings`", FIELDS, _fields(Finding)


def _simulator_tables() -> Iterator[Table]:
    yield "Settings of a scenario: `dora simulate`", SETTINGS, _settings(Scenario)
    yield "One run, over the measured steps: `dora simulate`", ("field", "line", "meaning"), _run_fields()
    yield "A run that violated a guarantee", FIELDS, _fields(BrokenReport)
    yield "All policies: `dora simulate --compare`", COLUMNS, _columns(comparison.COLUMNS)
    yield "All policies as JSON", FIELDS, _fields(ComparisonTree, ("policies[].", comparison.Compared))
    yield "Presets: `dora simulate presets`", FIELDS, _fields(PresetRow)
    yield "Fault sweeps: `dora simulate sweep`", FIELDS, _fields(SweepReport)
    yield "Faults", ("kind", "what happens"), _named({name: kind.meaning for name, kind in KINDS.items()})


def _planner_tables() -> Iterator[Table]:
    yield "Splits: `dora plan`", COLUMNS, _columns(plan.COLUMNS)
    yield "Splits as JSON, beside the fields of the best split", FIELDS, _fields(plan.PlanReport)
    yield "Workers to add: `dora plan --generation-s`", FIELDS, _fields(plan.Adjustment)
    yield "Cost of an engine: `dora profile`", FIELDS, _fields(ProfileReport)


def meanings(kind: Any) -> dict[str, str]:
    """Returns the fields of a dataclass or TypedDict with their meanings. Raises TypeError for a field without one."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is not Annotated or not isinstance(hint.__metadata__[0], str):
            raise TypeError(f"{kind.__name__}.{name} has no description")
        found[name] = hint.__metadata__[0]
    return found


def _page(name: str, tables: Sequence[Table]) -> str:
    if len(tables) == 1:
        title, headings, rows = tables[0]
        return f"# {title}\n\n{_table(headings, rows)}"
    sections = (f"## {title}\n\n{_table(headings, rows)}" for title, headings, rows in tables)
    return "\n".join((f"# {name}\n", *sections))


def _table(headings: Sequence[str], rows: Rows) -> str:
    return "".join(f"{line}\n" for line in (_line(headings), _line("---" for _ in headings), *map(_line, rows)))


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _named(texts: Mapping[str, str]) -> Rows:
    return ((f"`{name}`", text) for name, text in texts.items())


def _metrics(declared: Iterable[DeclaredMetric[Any]], histograms: Iterable[Distribution] = ()) -> Rows:
    for each in declared:
        yield f"`{each.name}`", each.kind, ", ".join(f"`{label}`" for label in each.labels), each.meaning
    for distribution in histograms:
        yield (
            f"`{distribution.name}`",
            "histogram",
            f"`{distribution.label}`" * bool(distribution.label),
            distribution.meaning,
        )


def _engine_histograms() -> Rows:
    for each in HISTOGRAMS:
        yield f"`{each.name}`", "histogram", ", ".join(f"`{label}`" for label in LABELS), each.meaning


def _commands() -> Rows:
    companions = {"simulate": run, "simulate sweep": sweep, "simulate presets": presets, "tls make": tls}
    own = {name: (getattr(module, name.split()[-1]), module.EXAMPLE) for name, module in companions.items()}
    own |= {f"cluster {name}": command for name, command in CLUSTER_COMMANDS.items()}
    for name, (function, example) in (COMMANDS | own).items():
        yield f"`{name}`", (function.__doc__ or "").partition("\n")[0], f"`{example}`"


def _access() -> Rows:
    for method in ACCESS:
        yield f"`{method}`", *("yes" if may_call(role, method) else "" for role in Role)


def _routes() -> Rows:
    within = {f"`{each.verb} {each.path}`, also within `{SESSION}`": each.does for each in AGENTS}
    within |= {f"`{TINKER}...`, also within `{SESSION}`": TURNS}
    own = {f"`{each.verb} {each.path}`": each.does for each in OWN}
    pages = {f"`--metrics`: {PLACES}": READS}
    for route, does in (within | own | pages).items():
        yield route.replace("{session}", "ID"), *("yes" if may_call(role, does) else "" for role in Role)


def _errors() -> Rows:
    for kind in ERRORS:
        error = kind.__new__(kind)  # the exit code depends on the class alone
        status = "" if kind in (NoAnswer, CallFailed) else status_of(error).name
        meaning = (kind.__doc__ or "").partition("\n")[0].replace("``", "`")
        yield f"`{kind.__module__}.{kind.__name__}`", status, exit_code_of(error).value, meaning


def _columns(columns: Iterable[Column[Any]]) -> Rows:
    for column in columns:
        heading = in_a_line(column.heading).format(unit="min or s", limit="limit")
        yield heading or "(first)", column.meaning


def _fields(kind: Any, *below: tuple[str, Any]) -> Rows:
    return (row for place, each in (("", kind), *below) for row in _placed(each, place))


def _placed(kind: Any, place: str) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(kind)
    for name, meaning in meanings(kind).items():
        yield f"`{place}{name}`", meaning
        inner, each = _inner(hints[name])
        if inner is not None:
            yield from _placed(inner, f"{place}{name}{each}.")


def _inner(hint: Any) -> tuple[Any, str]:
    if get_origin(hint) in (list, tuple):
        return _inner(get_args(hint)[0])[0], "[]"
    if get_origin(hint) in (Union, UnionType):
        return _inner(get_args(hint)[0])
    described = (is_dataclass(hint) or is_typeddict(hint)) and hint is not Report
    return (hint if described else None), ""


def _run_fields() -> Rows:
    lines: dict[str, str] = {}
    for line in LINES:
        for field in line.fields:
            lines.setdefault(field, line.name.strip().format(unit="minutes or seconds"))
    for kind in (Report, Division, Origin):
        for name, meaning in meanings(kind).items():
            yield f"`{name}`", lines.get(name, ""), meaning
    yield "`replay`", "", "the command that repeats the run"


def _settings(model: type[BaseModel], place: str = "", defaults: object = None) -> Rows:
    for name, field in model.model_fields.items():
        section, default = section_of(field), getattr(defaults, name, field.default)
        if section is not None:
            element = ".N" if get_origin(kind_of(field)) is tuple else ""
            yield from _settings(section, f"{place}{name}{element}.", default)
        elif field.description:
            yield f"`{place}{name}`", _default(default), _allowed(field), field.description
        else:
            raise TypeError(f"{model.__name__}.{name} has no description")


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "must be given"
    if value is None or value in ("", (), {}):
        return ""
    return str(value).lower() if isinstance(value, bool) else _digits(value)


def _allowed(field: FieldInfo) -> str:
    kind = kind_of(field)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    found = {name: getattr(each, name) for each in limits_of(field) for name in BOUNDS if hasattr(each, name)}
    if found.keys() == {"ge", "le"}:
        return f"{_digits(found['ge'])} to {_digits(found['le'])}"
    return ", ".join(f"{BOUNDS[name]} {_digits(value)}" for name, value in found.items())


def _digits(value: object) -> str:
    if isinstance(value, int):
        return f"2^{value.bit_length() - 1}" if value >= 1 << 40 and value & (value - 1) == 0 else f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def main(folder: Path) -> None:
    """Writes the pages into ``folder``, in place of those that it has."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in folder.glob("*.md"):
        page.unlink()
    for name, text in reference().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
