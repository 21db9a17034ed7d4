"""Finds user functions by name, checks them before the service starts, and calls them."""

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Final, Literal

from dora.rewards.verdict import Describe, described, one_line

Kind = Literal["reward", "filter"]
UserFunction = Callable[..., object]

PARAMETERS: Final[dict[Kind, tuple[str, ...]]] = {
    "reward": ("prompt_text", "response_text", "response_token_ids", "verifier"),
    "filter": ("prompt_text", "rewards", "verifier"),
}


def load_function(spec: str, kind: Kind, describe: Describe = described) -> UserFunction:
    """Returns the function named ``module:function``.

    Raises ValueError, with the end of a one-line sentence, if it cannot be imported, called, or called with the
    ``PARAMETERS`` of its kind.
    """
    module_name, _, function_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ValueError(f"names the module {module_name}, which cannot be imported ({describe(error)})") from error
    missing = object()
    function = getattr(module, function_name, missing)
    if function is missing:
        raise ValueError(f"names no function of {module_name}: {function_name}")
    if not callable(function):
        raise ValueError(f"names no function: {spec} is of the type {type(function).__name__}")
    return _callable(function, PARAMETERS[kind])


def _callable(function: UserFunction, parameters: tuple[str, ...]) -> UserFunction:
    if inspect.isclass(function):
        raise ValueError("names a class, whose call makes an instance of it; name a function, or an instance")
    if _yields(function):
        raise ValueError("contains yield, so that a call returns a generator; use return")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C without a signature: its first call tells
        return function
    try:
        signature.bind(*parameters)
    except TypeError as error:
        try:
            signature.bind(**dict.fromkeys(parameters))
        except TypeError:
            raise ValueError(f"takes {one_line(signature)[:200]} ({error})") from error
        return lambda *values: function(**dict(zip(parameters, values, strict=True)))
    return function


def _yields(function: UserFunction) -> bool:
    inner = inspect.unwrap(function)
    called = [inner] if inspect.isroutine(inner) or hasattr(inner, "func") else [inner, type(inner).__call__]
    return any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in called)


class FunctionRunner:
    """Calls one function. Awaits the result of an ``async def`` in one event loop for all calls."""

    def __init__(self, function: UserFunction) -> None:
        self._function = function
        self._loop: asyncio.Runner | None = None

    def __call__(self, *arguments: object) -> object:
        result = self._function(*arguments)
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop.run(_awaited(result))


async def _awaited(result: Awaitable[object]) -> object:
    return await result
