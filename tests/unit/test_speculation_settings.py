"""What of speculation is refused, by name and before an engine starts."""

import pytest

from dora.config import load_config
from dora.errors import InvalidValue
from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.cuda import Cuda
from dora.worker.vllm.device.port import EngineSettings
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


@pytest.mark.parametrize("device", [Cpu(), Cuda()])
def test_a_model_with_states_is_refused(device: Cpu | Cuda) -> None:
    device.check_speculation(SETTINGS, has_state=False)
    with refused(InvalidValue, field="workers.speculation", value="history"):
        device.check_speculation(SETTINGS, has_state=True)
