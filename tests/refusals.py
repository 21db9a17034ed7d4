"""Assertions on refusals: on an error's data, never on its wording, which tests/unit/test_error_catalogue.py shows."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from dora.errors import DoraError
from dora.rpc.errors import from_rpc_error

DATA_WORD = re.compile(r"[\w./<>-]*[\d_][\w./<>-]*")  # a number, an id, the name of a setting


@contextmanager
def refused(kind: type[BaseException], /, *, names: Sequence[object] = (), **data: Any) -> Iterator[Any]:
    """The block raises an error of exactly this type.

    ``data``: attributes that the error must have, such as ``field`` and ``value``; a field's name may lack its
    beginning, such as a file and line. A value that came over the wire is text. ``names``: numbers, ids and settings in
    the message.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    field = str(data.pop("field", ""))
    assert str(getattr(error, "field", "")).endswith(field), str(error)
    wrong = [name for name in data if str(getattr(error, name)) != str(data[name])]
    assert not wrong, f"{wrong} differ in: {error}"
    missing = [name for name in names if not any(form in str(error) for form in _written(name))]
    assert not missing, f"{missing} not named in: {error}"
    del caught, error  # whose traceback has this frame: a cycle would keep what the block's frames hold


@contextmanager
def refused_call(kind: type[DoraError], /, **data: Any) -> Iterator[Any]:
    """The block is a call of grpc's own stubs that ends with such an error's status and data."""
    with refused(kind, **data) as caught:
        try:
            yield caught
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


def _written(name: object) -> set[str]:
    """The forms in which a message may write a number or a name."""
    return {str(name), f"{name:,}"} if isinstance(name, int) else {str(name)}


def data_words(text: str) -> list[str]:
    """The numbers, ids and names of settings in a description of a refusal."""
    plain = text.replace("\\", "").strip("^$")
    return [
        word.strip(".") for word in DATA_WORD.findall(re.sub(r"\.[*+]|[(){}\[\]|?]", " ", plain)) if word.strip(".")
    ]
