"""The settings of the service's own evaluations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from dora.config import Config
from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.services import evaluation_series
from dora.prompts.tokenizer import ChatTokenizer
from tests.unit.effects.of_prompts import read_split
from tests.unit.effects.rows import Place, Row, Seen, Shown

SERIES: Final = "tests/e2e/test_evaluation_fake.py::test_the_service_evaluates_every_so_many_versions_by_itself"
BASE: Final = {"evaluation.prompts": "set", "evaluation.every": 1}


def split(config: Config, place: Place) -> list[str]:
    config = place.within(config, "evaluation.prompts")

    def read(_: Path, tokenizer: ChatTokenizer) -> list[Prompt]:
        check = PromptCheck(config, tokenizer=tokenizer, vocab_size=1000)
        return evaluation_series.evaluation_prompts(config, tokenizer, check)

    return read_split(place, read)


def share(config: Config, place: Place) -> list[float]:
    """The share of the workers that an evaluation of version 0 asks for."""
    asked: list[float] = []

    def begin(_name: str, _prompts: object, _version: int, share: float) -> None:
        asked.append(share)
        raise InvalidValue("share", share, "seen")  # it does not run

    recorder: Any = SimpleNamespace(is_evaluated=lambda _version: False, evaluated=lambda _result: None)
    telemetry: Any = SimpleNamespace(evaluated=[])
    evaluating: Any = SimpleNamespace(begin=begin)
    prompts, nothing = [cast(Any, "one")], cast(Any, None)
    evaluation_series.OwnEvaluations(config, nothing, nothing, recorder, telemetry, evaluating, prompts).at(0)
    return asked


ROWS: Final[dict[str, Row]] = {
    "evaluation.prompts": Shown(SERIES),
    "evaluation.every": Shown(SERIES),
    "evaluation.split": Seen("test", split, ["test"], base=BASE),
    "evaluation.keep_best": Shown(
        "tests/e2e/test_begin_from_fake.py::test_a_new_run_begins_with_a_named_checkpoint_of_one_that_goes_on"
    ),
    "evaluation.share": Seen(0.25, share, [0.25], base=BASE),
}
