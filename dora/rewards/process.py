"""A reward function's or a filter's process: ``python -m dora.rewards.process module:function [tokenizer folder]``.

Reads one call a frame from stdin and answers one frame each on what was stdout at its start; first it says whether the
function could be loaded. It ends when stdin ends, in the middle of a call too, so that it never outlives the service.
"""

import importlib
import json
import math
import numbers
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, SupportsFloat, TypeGuard

from tokenizers import Tokenizer

from dora.rewards import frames
from dora.types import Reward

LOG_MAX_CHARS = 16384
ALLOWED_RESULT = 'a finite number, or a mapping with a finite "reward"'

UserFunction = Callable[..., object]  # dora.rewards and dora.rewards.group_filter say of what
Message = dict[str, Any]


def load_function(spec: str) -> UserFunction:
    """The function that ``module:function`` names. Raises ValueError saying what is missing."""
    module_name, _, function_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"names the module {module_name}, which cannot be imported ({_described(error)})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"names no function of {module_name}: {function_name}")
    return function


def answer(function: UserFunction, call: Message, tokenizer: Tokenizer | None) -> Message:
    """Runs one call: a filter on a group where it has ``rewards``, else a reward function on a response."""
    return kept(function, call) if "rewards" in call else outcome(function, call, tokenizer)


def kept(function: UserFunction, call: Message) -> Message:
    """Runs a filter on one group: {"keep"}, or {"failure": what the function did}."""
    try:
        result = function(call["prompt_text"], call["rewards"], json.loads(call["verifier_json"]))
    except (Exception, SystemExit) as error:
        return {"failure": f"raised {_described(error)}"}
    if not isinstance(result, bool):
        return {"failure": f"returned {_shortened(result)}; allowed is True or False"}
    return {"keep": result}


def outcome(function: UserFunction, call: Message, tokenizer: Tokenizer | None) -> Message:
    """Runs a reward function: {"reward", "components", "log"}, or {"failure": what the function did}."""
    token_ids = call["response_token_ids"]
    text = call["response_text"]
    if text is None:
        text = tokenizer.decode(token_ids, skip_special_tokens=True) if tokenizer is not None else ""
    try:
        result = function(call["prompt_text"], text, token_ids, json.loads(call["verifier_json"]))
    except (Exception, SystemExit) as error:  # a plug-in may raise anything; it must not end this process
        return {"failure": f"raised {_described(error)}"}
    return checked(result)


def checked(result: object) -> Message:
    """What a reward function returned, as a message; a failure where it is not ``ALLOWED_RESULT``."""
    if isinstance(result, Reward):
        result = {"reward": result.value, "components": result.components, "log": result.log}
    record = result if isinstance(result, Mapping) else {"reward": result}
    reward = record.get("reward")
    if not _is_finite(reward):
        return {"failure": f"returned {_shortened(result)}; allowed is {ALLOWED_RESULT}"}
    components = record.get("components") or {}
    if not isinstance(components, Mapping):
        return {"failure": f"returned components = {_shortened(components)}; allowed is a mapping to finite numbers"}
    for name, value in components.items():
        if not _is_finite(value):
            return {"failure": f"returned component {name} = {_shortened(value)}; allowed is a finite number"}
    return {
        "reward": float(reward),
        "components": {str(name): float(value) for name, value in components.items()},
        "log": str(record.get("log", ""))[:LOG_MAX_CHARS],
    }


def main(arguments: list[str]) -> None:
    """Serves calls until stdin ends."""
    calls, replies = _private_streams()
    try:
        function = load_function(arguments[0])
        tokenizer = Tokenizer.from_file(str(Path(arguments[1]) / "tokenizer.json")) if len(arguments) > 1 else None
    except ValueError as error:
        _send(replies, {"failure": str(error)})
        return
    _send(replies, {"ready": True})
    # Read in a thread of its own, which ends the process as soon as the service is gone, also when a call hangs.
    pending: queue.Queue[Message] = queue.Queue(maxsize=1)
    threading.Thread(target=_read_calls, args=(calls, pending), daemon=True).start()
    while True:
        _send(replies, answer(function, pending.get(), tokenizer))


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
    """Takes stdin and stdout away from the plug-in, so that neither its prints nor its reads touch the frames."""
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return calls, replies


def _read_calls(calls: BinaryIO, pending: "queue.Queue[Message]") -> None:
    while (call := frames.read(calls)) is not None:
        pending.put(call)
    os._exit(0)


def _send(replies: BinaryIO, message: Message) -> None:
    replies.write(frames.encode(message))
    replies.flush()


def _is_finite(value: object) -> TypeGuard[SupportsFloat]:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _shortened(value: object) -> str:
    return repr(value)[:200]


if __name__ == "__main__":
    main(sys.argv[1:])
