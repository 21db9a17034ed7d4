"""The declaration of a patch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dora.errors import DoraError, InvalidValue


class PatchFailed(DoraError):
    """A patch did not take effect on this engine; the engine must not serve."""

    def __init__(self, patch: str, finding: str) -> None:
        super().__init__(f"engine patch {patch!r} did not take effect: {finding}", "patch", patch)


@dataclass(frozen=True, slots=True)
class Patch:
    """One change to vLLM in each rank's process. ``runner`` is the rank's model runner, ``model`` its torch module."""

    name: str
    vllm_range: str  # PEP 440 specifiers of the supported versions
    reason: str
    apply: Callable[[], None]  # before the engine is created; may be repeated
    verify: Callable[[Any], None]  # on the created engine; raises PatchFailed
    after_reload: Callable[[Any], None]  # on the model, after its weights were replaced in place

    def check_version(self, vllm_version: str) -> None:
        """Raises InvalidValue unless the patch supports this vLLM."""
        from packaging.specifiers import SpecifierSet  # in an engine's process alone
        from packaging.version import Version

        release = Version(vllm_version).public  # a local part, such as +cpu, names the build
        if not SpecifierSet(self.vllm_range).contains(release, prereleases=True):
            raise InvalidValue("vLLM version", vllm_version, f"{self.vllm_range}, which patch {self.name!r} is for")


def nothing(*_: Any) -> None:
    """Does nothing, for a patch without an action at this moment."""
