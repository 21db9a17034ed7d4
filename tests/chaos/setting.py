"""The sizes of a run, and the settings of its service."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.chaos.rewards import score
from tests.e2e.restarts import settings_of

WINDOW: Final = 3
GROUP_SIZE: Final = 4
HOST: Final = "h1"
HOST_WORKER: Final = f"{HOST}-w0"
SILENCE_S: Final = {"fake": 5.0, "vllm": 20.0}  # by engine, after which a worker is lost: vLLM's starts fill all cores
RECOVERY_MOST_S: Final = {"fake": 120.0, "vllm": 600.0}  # by engine, until everything is as it was
TRAINER_STALL_S: Final = 5.0
STATE_BYTES: Final = 160 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """The parameters of a run."""

    model: Path
    folder: Path  # of logs, record and state
    engine: str
    rows: list[dict[str, Any]] = field(repr=False)  # of prompts
    groups_per_step: int
    workers: int
    ranks: int = 1  # of each worker
    has_sessions: bool = True  # among the prompts
    has_host: bool = True  # that has joined
    has_link: bool = False  # to that host, which can be cut
    has_disk: bool = False  # of its own for the state, which can be filled up
    speculation: str = "off"
    has_alerts: bool = False  # a Prometheus scrapes the service

    @property
    def silence_s(self) -> float:
        return SILENCE_S[self.engine]

    @property
    def recovery_most_s(self) -> float:
        return RECOVERY_MOST_S[self.engine]

    @property
    def breaks(self) -> Path:
        return self.folder / "breaks"

    @property
    def record(self) -> Path:
        return self.folder / "record"


def settings_in(setting: Setting, state: Path) -> dict[str, Any]:
    """Returns the service's settings by dotted name; its state is in the folder ``state``."""
    is_fake = setting.engine == "fake"
    return settings_of(
        setting.model,
        setting.folder,
        prompts="none",
        service__state=str(state),
        record=str(setting.record),
        reward__function=f"{score.__module__}:{score.__name__}",
        window__size=WINDOW,
        rollout__group_size=GROUP_SIZE,
        rollout__max_tokens=400,
        rollout__ignore_eos=False,
        kv__pool_mb=16,
        workers__engine=setting.engine,
        workers__speculation=setting.speculation,
        workers__count=setting.workers,
        workers__tensor_parallel=setting.ranks,
        workers__slots=8,
        workers__block_tokens=16 if is_fake else 32,
        workers__kv_tokens=8192 if is_fake else 2048,
        workers__max_model_len_tokens=512,
        workers__restarts=10_000,
        workers__silence_timeout_s=setting.silence_s,
        host__lease_s=setting.silence_s,
        workers__stall_timeout_s=2 * setting.silence_s,
        service__prompts_queued_max=4096,
        **({"service__trainer_stall_timeout_s": TRAINER_STALL_S} if setting.has_alerts else {}),
    )
