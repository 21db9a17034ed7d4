"""The contract of turns on engines whose KV is not one list of alike blocks, and on one of two ranks."""

from collections.abc import Iterator

import pytest

from dora.models.tiny import make_tiny
from dora.worker.engine import RolloutEngine
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine
from tests.contract.driver import KV_TOKENS, MAX_MODEL_LEN_TOKENS, SLOTS, VersionFolder
from tests.contract.test_engine_forks import (  # noqa: F401
    test_a_block_that_others_have_stays_theirs,
    test_a_fork_equals_the_fork_of_the_session_left_alone,
    test_a_fork_equals_the_fork_that_is_prefilled_whole,
    test_a_fork_leaves_no_foreign_kv_in_the_prefix_cache,
)
from tests.contract.test_engine_turns import (  # noqa: F401
    test_a_dropped_session_continues_and_is_counted,
    test_a_kept_request_that_finds_no_room_brings_its_kv_with_its_next_turn,
    test_a_session_equals_the_session_left_alone,
    test_a_session_of_a_hundred_turns_equals_the_session_left_alone,
    test_parked_sessions_equal_the_sessions_left_alone,
    turns,
)

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("vllm-dense")]  # a process imports vLLM for many tests

KINDS = {"mla": 1, "window": 1, "dense": 2}  # of models, and the ranks of their engines


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def version_folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> VersionFolder:
    base = tmp_path_factory.mktemp(kind)
    return lambda version: make_tiny(kind, base / f"v{version}", seed=version, kv_heads=2)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def started_engine(kind: str, version_folder: VersionFolder) -> Iterator[RolloutEngine]:
    engine = VllmEngine(
        version_folder(1),
        EngineSettings(
            slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, tensor_parallel=KINDS[kind]
        ),
        lost=lambda reason: None,
    )
    yield engine
    engine.close()
