"""The settings of the service's own evaluations."""

import json
from types import SimpleNamespace
from typing import Any, Final, cast

from dora.config import Config
from dora.errors import DoraError, InvalidValue
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.services import evaluation_series
from dora.prompts import ChatTokenizer
from tests.unit.effects.rows import Place, Row, Seen, Shown

SERIES: Final = "tests/e2e/test_evaluation_fake.py::test_the_service_evaluates_every_so_many_versions_by_itself"
BASE: Final = {"evaluation.prompts": "set", "evaluation.every": 1}


def split(config: Config, place: Place) -> list[str]:
    """The prompts of a dataset's folder with two splits, or the setting that it needs."""
    folder = place.folder / "set"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": "ab", "prompt_id": name}) + "\n")
    config, tokenizer = place.within(config, "evaluation.prompts"), ChatTokenizer(place.model("dense"))
    try:
        check = PromptCheck(config, tokenizer=tokenizer, vocab_size=1000)
        return [each.prompt_id for each in evaluation_series.evaluation_prompts(config, tokenizer, check)]
    except DoraError as error:
        return [str(getattr(error, "field", ""))]


def share(config: Config, place: Place) -> list[float]:
    """The share of the workers that an evaluation of version 0 asks for."""
    asked: list[float] = []

    def begin(_runtime: Runtime, _name: str, _prompts: object, _version: int, share: float) -> None:
        asked.append(share)
        raise InvalidValue("share", share, "seen")  # it does not run

    place.monkeypatch.setattr(evaluation_series, "begin", begin)
    recorder = SimpleNamespace(is_evaluated=lambda _version: False, evaluated=lambda _result: None)
    runtime = SimpleNamespace(config=config, recorder=recorder, telemetry=SimpleNamespace(evaluated=[]))
    prompts = [cast(Any, "one")]
    evaluation_series.OwnEvaluations(cast(Runtime, runtime), prompts).at(0)
    return asked


ROWS: Final[dict[str, Row]] = {
    "evaluation.prompts": Shown(SERIES),
    "evaluation.every": Shown(SERIES),
    "evaluation.split": Seen("test", split, ["test"], base=BASE),
    "evaluation.share": Seen(0.25, share, [0.25], base=BASE),
}
