"""The service's own evaluations: every N-th version on the same prompts (``evaluation.every``).

Results go to the log, the record (evaluations.jsonl) and the status. An evaluation that cannot begin, or ends early, is
reported with its reason, and training continues.
"""

import asyncio
import logging
import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.config import Config, PromptsConfig
from dora.core.rules.evaluation import RESPONSES_MAX
from dora.data.score import Evaluated, Response, Score, responses_of, score_of_responses
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Prompt
from dora.errors import DoraError, InvalidValue
from dora.orchestrator.recovery import named
from dora.orchestrator.rollout.core import Core
from dora.orchestrator.rollout.evaluations import EvaluationStream
from dora.orchestrator.rollout.feed import driven
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.rollout.record_queue import RecordQueue
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.orchestrator.services.evaluation import Evaluating
from dora.prompts.files import is_file_source
from dora.prompts.resolving import resolve_prompts
from dora.prompts.tokenizer import ChatTokenizer
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

FIELD: Final = "evaluation.prompts"
NAME: Final = "every"
RUNNING_MAX: Final = 4  # at the same time; clients may run others
TOO_MANY: Final = f"{RUNNING_MAX} earlier evaluations of the series still run"


def evaluation_prompts(config: Config, tokenizer: ChatTokenizer, check: PromptCheck) -> list[Prompt]:
    """Returns the prompts of the series, checked, or none without a series. Raises InvalidValue, naming the row."""
    name = config.evaluation.prompts
    if not name:
        return []
    if config.evaluation.keep_best and not config.service.state:
        raise InvalidValue("evaluation.keep_best", True, "left out, or with service.state, the folder that keeps it")
    if not is_file_source(name):
        raise InvalidValue(FIELD, name, "a .jsonl or .parquet file, or a dataset's folder")
    of_prompts = {field: getattr(config.prompts, field) for field in ("columns", "other_columns", "verifier_kb")}
    settings = PromptsConfig(source=name, split=config.evaluation.split, **of_prompts)
    try:
        source = resolve_prompts(
            settings, tokenizer, config.rollout.seed, check=lambda prompt: check.checked(driven(prompt, config))
        )
    except InvalidValue as error:
        field = FIELD if error.field == "--prompts" else error.field.replace("prompts.split", "evaluation.split")
        raise type(error)(field, error.value, error.allowed, error.why) from error
    found: list[Prompt] = []
    while (prompt := source.at(len(found))) is not None:
        found.append(check.checked(prompt))
    responses = sum(prompt.group_size for prompt in found)
    if responses > RESPONSES_MAX:
        raise InvalidValue(FIELD, name, f"with at most {RESPONSES_MAX:,} responses in all", f"asks for {responses:,}")
    return found


@dataclass(eq=False, repr=False)
class OwnEvaluations:
    """Runs the series of one service. Without prompts it does nothing."""

    _config: Config
    _core: Core
    _store: WeightStore
    _recorder: RecordQueue
    _telemetry: Telemetry
    _evaluating: Evaluating
    _prompts: Sequence[Prompt]

    def __post_init__(self) -> None:
        self._settings = self._config.evaluation
        self._last = -1  # version that was begun
        self._running = 0
        self._comparing = threading.Lock()  # several evaluations may end at once
        self._state = Path(self._config.service.state) if self._settings.keep_best else None
        if self._state is not None:
            named.tidy(self._state)

    def at(self, version: int) -> None:
        """Begins the evaluation of ``version``, the newest, if it is due."""
        is_known = version <= self._last or self._recorder.is_evaluated(version)
        if not self._prompts or version % self._settings.every or is_known:
            return
        self._last = version
        begun_at = time.time()
        try:
            if self._running >= RUNNING_MAX:
                raise InvalidValue("evaluation", version, "one of fewer", said=TOO_MANY)
            stream = self._evaluating.begin(NAME, self._prompts, version, self._settings.share)
        except DoraError as error:
            self._ended(version, begun_at, [], 0, str(error))
            return
        self._running += 1
        self._core.spawn(self._collect(version, begun_at, stream))

    async def _collect(self, version: int, begun_at: float, stream: EvaluationStream) -> None:
        groups: list[list[Response]] = []
        refused = 0
        prepared = await asyncio.to_thread(self._prepared, version)  # the version may retire meanwhile
        async for result in stream.results():
            if isinstance(result, TrajectoryGroup):
                groups.append(responses_of(result))
            else:
                refused += 1
        self._running -= 1
        self._ended(version, begun_at, groups, refused, stream.reason)
        if prepared is not None:
            complete = len(groups) == len(self._prompts)
            await asyncio.to_thread(self._compared, prepared, version, score_of_responses(groups), complete)

    def _prepared(self, version: int) -> Path | None:
        """Returns the version's files, in case it is the best one, or None if they are not wanted or cannot be kept."""
        if self._state is None:
            return None
        try:
            source = named.source_of(self._state, self._store.folder(version), version)
            return named.prepare(self._state, f"{named.BEST}-{version}", source)
        except OSError as error:
            log.warning("version %d cannot become the checkpoint %s: %s", version, named.BEST, error.strerror)
            return None

    def _compared(self, prepared: Path, version: int, score: Score, complete: bool) -> None:
        """Keeps the version as the best one if its complete evaluation has a higher mean reward."""
        assert self._state is not None
        with self._comparing:
            best = named.facts_of(self._state, named.BEST).get("reward_mean", -math.inf)
            try:
                if complete and score.reward_mean > best:
                    facts = {"version": version, "reward_mean": score.reward_mean, "kept_at": time.time()}
                    named.finish(prepared, named.BEST, facts)
                    log.info(
                        "version %d is the checkpoint %s: mean reward %.4f", version, named.BEST, facts["reward_mean"]
                    )
            except OSError as error:
                log.warning("version %d cannot become the checkpoint %s: %s", version, named.BEST, error.strerror)
            finally:
                shutil.rmtree(prepared, ignore_errors=True)

    def _ended(self, version: int, begun_at: float, groups: list[list[Response]], refused: int, reason: str) -> None:
        requested, score = len(self._prompts), score_of_responses(groups)
        missing = requested - len(groups) - refused
        evaluated = Evaluated(version, requested, missing, refused, reason, begun_at, time.time(), score)
        self._telemetry.evaluated.append(evaluated)
        self._recorder.evaluated(evaluated)
        if missing or refused:
            log.warning(
                "evaluation of version %d: %d of %d prompts are missing, %d refused (%s)",
                *(version, missing, requested, refused, reason),
            )
        if groups:
            log.info(
                "evaluation of version %d: mean reward %.4f of %d prompts", version, score.reward_mean, len(groups)
            )
