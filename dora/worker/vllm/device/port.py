"""The protocol of a device, and the settings of an engine. Imports neither torch nor vLLM."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from dora.data.types import EngineNumerics
from dora.engine_patches.patch import Patch
from dora.errors import InvalidValue
from dora.worker.reservation import KvStore

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dora.engine_patches.mapped_weights import Source
    from dora.weights.image import ImageNote
    from dora.worker.drafting.model_drafter import Choose

Kind = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
KINDS: Final[tuple[Kind, ...]] = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of one engine.

    If ``kv_tokens`` is 0, the device's free memory decides. If ``block_tokens`` is 0, the attention backend does.
    ``dtype`` is float32, bfloat16, or empty for the device's. Weights, activations and KV share ``memory_share`` of a
    GPU's memory. ``quantisation`` is int8, fp8, or empty for none; ``kv_dtype`` is one of vLLM's, or empty for
    ``dtype``. ``full_precision`` says that a service has taken both away. ``batch_invariant`` is vLLM's mode in which a
    request's logits do not depend on its neighbours. ``state_bytes`` of host memory keep states to which sessions may
    return. ``speculation`` is history, ngram, model:DIR, or empty for none; its history, or the KV of its draft model,
    takes ``history_bytes``. ``engine_args`` are a user's own of vLLM's (``dora.data.engine_args``).
    """

    slots: int
    kv_tokens: int
    max_model_len_tokens: int
    block_tokens: int = 32
    dtype: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    quantisation: str = ""
    kv_dtype: str = ""
    full_precision: bool = False
    memory_share: float = 0.9
    batch_invariant: bool = False
    state_bytes: int = 1 << 30
    speculation: str = ""
    history_bytes: int = 64 << 20
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def numerics(self) -> EngineNumerics:
        return EngineNumerics(self.quantisation, self.dtype, self.batch_invariant, self.kv_dtype)

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


class Device(Protocol):
    """One kind of device, for one engine in this process."""

    kind: Kind
    default_dtype: Dtype
    environment: Mapping[str, str]  # vLLM's, set unless the operator has set it
    worker_class: str  # the value of vLLM's ``worker_cls``
    fixed_arguments: Mapping[str, str]  # of vLLM's, that no user may set here, with the reason
    proves_reloads: bool  # the engine verifies a reload itself, at its first load (``VllmEngine.load_weights``)

    def check_platform(self, settings: EngineSettings) -> None:
        """Raises InvalidValue if the installed vLLM serves on another device or cannot serve ``settings`` on this."""

    def draft_sampler(self, settings: EngineSettings) -> "Choose":
        """Returns how a draft model chooses tokens as the engine does."""

    def patches(self) -> Sequence[Patch]:
        """Returns the patches to vLLM, in the order in which they apply."""

    def check_runner(self, runner: Any) -> str:
        """Returns why vLLM's model runner is not one that this device supports, or an empty text."""

    def arguments(self, settings: EngineSettings) -> dict[str, Any]:
        """Returns the arguments of vLLM's ``EngineArgs`` that depend on the device. A pure function."""

    def resume_arguments(self, outputs: Sequence[int], prompt: Sequence[int], draws: int) -> dict[str, Any] | None:
        """Returns ``SamplingParams.extra_args`` of a request that enters with outputs, or None if it needs none."""

    def weight_source(self, device: "torch.device", ranks: int) -> "Source":
        """Returns the way of tensors from safetensors files to the model of one of an engine's ranks, with memory for
        it. Of several ranks each reads its own part.

        Its generator yields name and tensor, and raises DeadlineExceeded, and InvalidValue for an unreadable file.
        """

    def image_source(self, note: "ImageNote", device: "torch.device") -> "Source | None":
        """Returns the way of tensors from an image in the trainer's memory, or None if engines here read files alone.

        Its generator raises ImageRefused too, even in the middle.
        """

    def handle(self, tensor: "torch.Tensor") -> tuple[Any, ...]:
        """Returns a small value by which the engine's process can open a KV tensor of this rank's process."""

    def opened(self, handle: tuple[Any, ...]) -> "torch.Tensor":
        """Returns the tensor of a rank's ``handle``: the same memory, as long as the rank lives."""

    def kv_store(
        self,
        rows: "Callable[[], Mapping[str, Sequence[np.ndarray]]]",
        tensors: "Callable[[], Sequence[Mapping[str, torch.Tensor]]]",
        groups: Mapping[str, int],
        block_count: int,
    ) -> KvStore:
        """Returns the store of the KV-cache. ``rows`` gives each layer's blocks in host memory, of each rank that holds
        it, ``tensors`` gives each rank's tensors by layer, and ``groups`` has each layer's group.
        """


def check_verifiable(settings: EngineSettings, *, has_state: bool) -> None:
    """Raises InvalidValue if no device verifies drafts with these settings; with ``has_state`` layers keep a state."""
    if has_state:
        allowed = "off: layers of this model keep a state, which a token that was not sampled would change"
        raise InvalidValue("workers.speculation", settings.speculation, allowed)
    if settings.pipeline_parallel > 1:
        allowed = f"off with workers.pipeline_parallel = {settings.pipeline_parallel}: the first stage knows no drafts"
        raise InvalidValue("workers.speculation", settings.speculation, allowed)


def check_installed(kind: Kind, installed: str) -> None:
    """Raises InvalidValue if the installed vLLM serves on another kind of device."""
    if installed != kind:
        allowed = f"{installed}, on which the installed vLLM serves, or another build of vLLM (docs/install.md)"
        raise InvalidValue("device", kind, allowed)
