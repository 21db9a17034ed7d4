"""``python deploy/grafana/make.py``: writes the dashboards in Grafana's form, from ``panels.yml``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).parent / "dashboards"
SELECTOR: Final = 'job=~"$job", instance=~"$instance"'
PANELS: Final = Path(__file__).parent / "panels.yml"
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS: Final = 24  # of Grafana's grid


@dataclass(frozen=True)
class Panel:
    """``queries``: PromQL by legend, in which ``$at`` stands for the selector. ``kind``: a panel type of Grafana."""

    title: str
    unit: str
    queries: Mapping[str, str]
    meaning: str = ""
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    """``of``: a metric whose instances can be chosen."""

    name: str
    title: str
    of: str
    rows: Sequence[tuple[str, Sequence[Panel]]]


def dashboards() -> list[Dashboard]:
    """Reads the panels."""
    return [
        Dashboard(
            name,
            tree["title"],
            tree["of"],
            tuple((row["title"], tuple(Panel(**panel) for panel in row["panels"])) for row in tree["rows"]),
        )
        for name, tree in yaml.safe_load(PANELS.read_text()).items()
    ]


def tree_of(dashboard: Dashboard) -> dict[str, Any]:
    """Returns the dashboard in Grafana's form."""
    panels: list[dict[str, Any]] = []
    x = y = 0
    for title, row in dashboard.rows:
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], **_place(0, y, COLUMNS, 1)})
        x, y = 0, y + 1
        for panel in row:
            height = 4 if panel.kind == "stat" else 8
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            panels.append(_panel(panel) | _place(x, y, panel.width, height))
            x += panel.width
        y += height
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": f"dora-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["dora"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables(dashboard.of)},
        "annotations": {"list": []},
        "panels": panels,
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": expression.replace("$at", SELECTOR),
            "legendFormat": legend,
        }
        for number, (legend, expression) in enumerate(panel.queries.items())
    ]
    if panel.kind == "heatmap":
        targets = [target | {"format": "heatmap"} for target in targets]
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stacked else {}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {},
    }


def _variables(metric: str) -> list[dict[str, Any]]:
    """The variables of a dashboard: data source, job, and the service or host."""

    def values(name: str, label: str, selector: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": SOURCE,
            "query": f"label_values({metric}{selector}, {name})",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        }

    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        values("job", "Job", ""),
        values("instance", "Instance", '{job=~"$job"}'),
    ]


def main() -> None:
    for dashboard in dashboards():
        file = FOLDER / f"{dashboard.name}.json"
        file.write_text(json.dumps(tree_of(dashboard), indent=1) + "\n")


if __name__ == "__main__":
    main()
