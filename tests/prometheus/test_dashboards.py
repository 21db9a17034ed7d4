"""The dashboards of deploy/grafana: made from their panels, and every query answered by a real Prometheus."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from dora.agents.front.figures import DISTRIBUTIONS as FRONT_DISTRIBUTIONS
from dora.agents.front.figures import FRONT
from dora.agents.front.run import FrontOptions, front
from dora.client import Trainer
from dora.data.engine_times import HISTOGRAMS
from dora.orchestrator.metrics.of_hosts import HOST
from dora.orchestrator.metrics.of_service import SERVICE
from dora.orchestrator.rollout.distributions import DISTRIBUTIONS
from tests.prometheus.metrics_of import metrics_of
from tests.prometheus.server import scraping
from tests.service import beside, configured, running
from tests.snippets import ROOT

GRAFANA: Final = ROOT / "deploy" / "grafana"
FILES: Final = sorted((GRAFANA / "dashboards").glob("*.json"))
VALUES: Final = {"$__rate_interval": "10s", "$job": "dora", "$instance": ".+"}
UNSEEN: Final = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}  # not declared by DORA


def queries() -> Mapping[str, str]:
    """Every query of every panel, by dashboard, panel and number."""
    found = {}
    for file in FILES:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                found[f"{file.stem}: {panel['title']}: {target['refId']}"] = target["expr"]
    return found


def filled(expression: str) -> str:
    """The query with its variables replaced."""
    for name, value in VALUES.items():
        expression = expression.replace(name, value)
    return expression


def test_the_dashboards_are_made_from_their_panels(tmp_path: Path) -> None:
    folder = tmp_path / "grafana"
    (folder / "dashboards").mkdir(parents=True)
    for name in ("make.py", "panels.yml"):
        (folder / name).write_bytes((GRAFANA / name).read_bytes())
    subprocess.run([sys.executable, folder / "make.py"], check=True)
    made = {file.name: file.read_text() for file in (folder / "dashboards").iterdir()}
    assert made == {file.name: file.read_text() for file in FILES}


def test_the_dashboards_are_provisioned_and_take_any_data_source() -> None:
    for file in (GRAFANA / "provisioning").rglob("*.yml"):
        assert yaml.safe_load(file.read_text())["apiVersion"] == 1
    for file in FILES:
        tree: dict[str, Any] = json.loads(file.read_text())
        panels = tree["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert [each["name"] for each in tree["templating"]["list"]] == ["datasource", "job", "instance"]
        assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {"${datasource}"}
        places = [panel["gridPos"] for panel in panels]
        assert all(place["x"] + place["w"] <= 24 for place in places)
        assert len({(place["x"], place["y"]) for place in places}) == len(places)


def test_the_queries_name_metrics_that_exist() -> None:
    known = {
        each.name for each in (*SERVICE, *HOST, *DISTRIBUTIONS, *FRONT, *FRONT_DISTRIBUTIONS, *HISTOGRAMS)
    } | UNSEEN
    for place, expression in queries().items():
        assert metrics_of(expression) <= known, place


def asking(url: str) -> AbstractAsyncContextManager[None]:
    """An agent that asks again and again."""

    async def ask() -> None:
        chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, "stream": True}
        async with aiohttp.ClientSession() as http:
            while True:
                async with http.post(f"{url}/v1/chat/completions", json=chat) as reply:
                    await reply.read()

    return beside(ask())


async def test_no_panel_is_empty_on_a_service_under_load(
    tiny_dense: Path, tmp_path: Path, binary: Callable[[str], Path]
) -> None:
    """The trainer, and an agent of a front, go on until Prometheus has an answer to every query."""
    config = configured(
        tiny_dense,
        workers__engine="fake",
        workers__count=2,
        workers__orphan_timeout_s=0.5,
        window__size=2,
        kv__pool_mb=16,
        service__metrics="127.0.0.1:0",
        service__state=str(tmp_path / "state"),
        record=str(tmp_path / "record"),
    )
    empty = {place: filled(expression) for place, expression in queries().items()}
    async with (
        running(config) as handle,
        scraping(binary("prometheus"), handle.metrics, tmp_path) as prometheus,
        Trainer(handle.address, token=handle.token) as trainer,
        front(FrontOptions(handle.address, handle.token, "127.0.0.1:0", model=tiny_dense)) as url,
        asking(url),
    ):
        async for step in trainer.steps(groups=4):
            async for _group in step:
                pass
            await step.commit(weights=handle.model, wait=True, metrics={"clip_fraction": 0.1})
            for place, expression in list(empty.items()):
                if await prometheus.query(expression):
                    del empty[place]
            if not empty:
                break
        rules = await prometheus.get("rules")
    assert not empty
    assert {rule["health"] for group in rules["groups"] for rule in group["rules"]} <= {"ok", "unknown"}
