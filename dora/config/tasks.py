"""Settings of prompts, and of what judges their responses: rewards, sessions, environments, evaluations."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dora.config.section import Section, VariableName
from dora.data.limits import Seconds, Timeout
from dora.errors import InvalidValue


class ColumnsConfig(Section):
    """The columns of a file with the fields of a prompt. An empty one has the field's own name."""

    prompt: str = Field("", description="a text (own names: `prompt`, `text`)")
    messages: str = Field("", description="a chat: a list of {role, content}")
    prompt_token_ids: str = Field("", description="token ids (own names: `prompt_token_ids`, `token_ids`)")
    prompt_id: str = Field("", description="a name that no other prompt has")
    task_id: str = Field("", description="the name of its kind, for the trainer")
    answer: str = Field("", description='what the reward function gets as verifier["answer"]')
    verifier: str = Field("", description="an object that the reward function gets")
    group_size: str = Field("", description="responses to it")
    group_size_min: str = Field("", description="responses that start at once, the rest once two rewards differ")
    sampling: str = Field("", description="an object of sampling parameters")
    priority: str = Field("", description="of prompts that wait, the highest goes first")
    environment: str = Field("", description="the environment that drives its responses, as sessions of several turns")


class PromptsConfig(Section):
    """The source of prompts. A text in place of the section is its ``source``."""

    source: str = Field(
        "reasoning-gym:chain_sum",
        min_length=1,
        description="reasoning-gym:TASK,..., counting, tiny, tiny-tail, tasks, a .jsonl or .parquet file, a dataset's "
        "folder, or none",
    )
    split: str = Field("", description="of a dataset with several, such as train; empty: it has one")
    columns: ColumnsConfig = ColumnsConfig()
    other_columns: Literal["refuse", "ignore", "verifier"] = Field(
        "refuse", description="columns that are no field of a prompt; verifier: the reward function gets them"
    )
    verifier_kb: int = Field(
        1024, ge=1, le=8192, description="largest `verifier` of a prompt, with its `answer`, as JSON, in KiB"
    )
    epochs: int = Field(1, ge=0, le=1 << 20, description="how often a file or dataset is gone through; 0: without end")
    shuffle: bool = Field(False, description="each epoch in an order of its own, which follows from shuffle_seed")
    shuffle_seed: int = Field(0, ge=0, lt=1 << 63, description="same seed, same orders")
    then: Literal["end", "wait"] = Field(
        "end", description="after the source's last prompt: the last step ends, or prompts over gRPC are waited for"
    )


class RewardConfig(Section):
    """The verifier: a plug-in ``module:function``, run in separate processes."""

    function: str = Field(
        "", pattern=r"^$|^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:function; empty: the prompt source's own"
    )
    timeout_s: Timeout = Field(10.0, description="a verdict that takes longer counts as failed")
    workers: int = Field(1, ge=1, le=256, description="processes that score")
    queued_max: int = Field(8192, ge=1, description="responses that may wait for a verdict")
    environment: tuple[VariableName, ...] = Field(
        (), description="variables of the surroundings that functions get too, such as OPENAI_API_KEY"
    )
    memory_mb: int = Field(
        4096, ge=256, le=1 << 24, description="of a function's process, which is replaced if a call leaves 75% used"
    )
    open_files: int = Field(
        1024, ge=64, le=1 << 20, description="of a function's process, which is replaced if a call leaves 75% open"
    )
    processes: int = Field(256, ge=1, le=1 << 16, description="that a function may have started and left behind")
    calls_max: int = Field(0, ge=0, description="calls after which a function's process is replaced; 0: no limit")


class SessionsConfig(Section):
    """Time limits of sessions: responses of several turns, between which their tools run."""

    idle_timeout_s: Seconds = Field(600.0, description="longest wait for the next turn; 0: no limit")
    total_timeout_s: Seconds = Field(7200.0, description="longest time from a session's first turn on; 0: no limit")
    on_timeout: Literal["replace", "end"] = Field(
        "replace",
        description="replace: a new session of the same group begins; end: it ends with what it has, and no reward",
    )
    replacements: int = Field(
        2,
        ge=0,
        le=100,
        description="times that a session may be replaced; then it ends with what it has, and no reward",
    )
    forks: int = Field(64, ge=0, le=4096, description="times that a session may fork: each adds a branch at most")
    open_max: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="sessions that clients may have opened in groups that no step has trained on yet",
    )


class EnvironmentConfig(Section):
    """An environment that drives the sessions of all prompts of the source, in a process of its own."""

    spec: str = Field(
        "",
        pattern=r"^$|^[A-Za-z_][\w.-]*:[^\s:][^\s]*$",
        description="module:Class, gymnasium:ID, openenv:URL or verifiers:NAME; empty: none. Prompts that name one "
        "themselves keep it",
    )
    python: str = Field("", description="of verifiers:NAME: the interpreter of an environment that has verifiers")
    timeout_s: Timeout = Field(
        600.0,
        description="time that the code of one session may take in all, its start-up included; turns do not count",
    )
    turns: int = Field(
        0, ge=0, le=1 << 16, description="of a session, which then ends with the rewards of its turns; 0: no limit"
    )
    at_once: int = Field(256, ge=1, le=1 << 16, description="sessions of one process at a time; others wait")
    starting: int = Field(16, ge=1, le=1 << 16, description="sessions of one process that may start up at a time")
    warm: int = Field(
        0,
        ge=0,
        le=1 << 12,
        description="environments of one process that are prepared before a session needs them",
    )
    verdicts: int = Field(
        4096,
        ge=0,
        le=1 << 20,
        description="ends of conversations that one process keeps, of a class that says that it is deterministic",
    )
    memory_mb: int = Field(4096, ge=256, le=1 << 24, description="of one process, which is started again beyond it")
    open_files: int = Field(4096, ge=64, le=1 << 20, description="of one process")
    processes: int = Field(256, ge=1, le=1 << 16, description="that the environments of one process may have started")


class EvaluationConfig(Section):
    """Evaluations by the service itself: every N-th version on the same prompts, beside training."""

    prompts: str = Field(
        "", description="a .jsonl or .parquet file, or a dataset's folder, with the columns of `prompts`; empty: none"
    )
    split: str = Field("", description="of a dataset with several, such as test; empty: it has one")
    every: int = Field(0, ge=0, description="steps from one evaluated version to the next; 0: no evaluations")
    share: float = Field(
        0.0, ge=0.0, le=0.5, description="of the version's workers, kept for the evaluation; 0: only idle slots"
    )
    keep_best: bool = Field(
        False, description="the version of the highest mean reward is kept as checkpoint `best` in service.state"
    )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.prompts and not self.every:
            raise InvalidValue("evaluation.every", 0, "at least 1, because evaluation.prompts is set")
        for name in ("every", "split", "share", "keep_best") if not self.prompts else ():
            if value := getattr(self, name):
                raise InvalidValue(f"evaluation.{name}", value, "left out, or with evaluation.prompts")
        return self
