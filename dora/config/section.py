"""The base of all sections of the configuration, and the bounded types that only pydantic can express."""

from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, Strict, StringConstraints, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from dora.data.validation import kind_of, words_of

StopTokenId = Annotated[int, Strict(), Ge(0), Le((1 << 31) - 1)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_*][A-Za-z0-9_*]*$", max_length=256)]


class Section(BaseModel):
    """A section, whose fields are frozen and known."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _only_a_number_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses ``true`` and ``"1"``, which would otherwise pass as 1."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool | str) and kind_of(field) in (int, float) and value not in words_of(field):
            raise PydanticCustomError("number", "a number")
        return value
