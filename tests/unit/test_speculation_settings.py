"""What of speculation is refused, by name and before an engine starts."""

import pytest

from dora.config import load_config
from dora.errors import InvalidValue
from dora.worker.vllm.device.port import EngineSettings, check_verifiable
from tests.refusals import refused

SETTINGS = EngineSettings(8, 1024, 256, speculation="history")


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["workers.speculation=eagle"], "workers.speculation"),
        (["workers.speculation=history", "workers.engine=fake"], "workers.speculation"),
        (["workers.speculation=ngram", "workers.pipeline_parallel=2"], "workers.speculation"),
        (["workers.speculation=model:"], "workers.speculation"),
        (["workers.speculation=model:/x", "workers.device=cuda", "workers.pipeline_parallel=2"], "workers.speculation"),
        (["workers.history_mb=0"], "workers.history_mb"),
        (["workers.history_mb=4097"], "workers.history_mb"),
        (["workers.engine_args={speculative_config={}}"], "workers.engine_args"),
    ],
)
def test_a_setting_that_no_engine_can_have_is_refused(overrides: list[str], field: str) -> None:
    with refused(InvalidValue, field=field):
        load_config(None, overrides)


def test_a_model_with_states_is_refused() -> None:
    check_verifiable(SETTINGS, has_state=False)
    with refused(InvalidValue, field="workers.speculation", value="history"):
        check_verifiable(SETTINGS, has_state=True)
