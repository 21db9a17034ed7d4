"""A user function's process: takes calls from its supervisor, one by one, and answers each with a verdict.

The function shares this process and may fork, print, or end it. The two pipes to the supervisor are therefore private:
they are closed in forks and executed programs, and a fork that returns from the function ends here.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from dora.rewards import frames
from dora.rewards.frames import ENDED, TICKET
from dora.rewards.function import FunctionRunner, Kind, UserFunction, load_function
from dora.rewards.limits import UserLimits
from dora.rewards.verdict import Describe, Message, decision, described, verdict
from dora.system.prefixed_output import prefix_output

ERROR_CHARS: Final = 300  # of the error that a limit caused: the name of the limit follows


def serve_calls(
    spec: str, kind: Kind, tokenizer_folder: Path | None, calls_fd: int, verdicts_fd: int, limits: UserLimits
) -> None:
    """Reports whether the function could be loaded, then serves calls until the supervisor ends."""
    own_id = os.getpid()
    private = [calls_fd, verdicts_fd]
    os.register_at_fork(after_in_child=lambda: _close(private))

    def send(message: Message) -> None:
        if os.getpid() != own_id:  # forked without Python's knowledge
            os._exit(0)
        _write_all(verdicts_fd, frames.encode(message))

    errors, tokenizer, name = Errors(limits), None, spec
    prefix_output(lambda: name)
    if tokenizer_folder is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    try:
        function = load_function(spec, kind, errors.described)
    except ValueError as error:
        send({"failure": str(error), TICKET: b"", ENDED: True})
        return
    send({"ready": True, TICKET: b""})
    answer: Callable[[UserFunction, Message, Tokenizer | None, Describe], Message]
    answer, caller = (kept if kind == "filter" else outcome), FunctionRunner(function)
    with open(calls_fd, "rb", closefd=False) as calls:
        while (call := frames.read(calls)) is not None:
            name = call.get("name") or spec
            message = {**answer(caller, call, tokenizer, errors.described), TICKET: call[TICKET]}
            send({**message, ENDED: True} if errors.at_limit else message)


class Errors:
    """Describes errors of user code. If ``at_limit``, one of them was a limit, and a new process takes over."""

    def __init__(self, limits: UserLimits) -> None:
        self._limits = limits
        self.at_limit = False

    def described(self, error: BaseException) -> str:
        """Returns an error as one line, with the limit behind it, if any."""
        limit = self._limits.exceeded(error)
        if not limit:
            return described(error)
        self.at_limit = True
        return f"{described(error)[:ERROR_CHARS]}; {limit}"


def kept(function: UserFunction, call: Message, _tokenizer: Tokenizer | None, describe: Describe) -> Message:
    """Runs a filter on one group. Returns {"keep"}, or {"failure": the reason}."""
    try:
        result = function(call["prompt_text"], call["rewards"], json.loads(call["verifier_json"]))
    except BaseException as error:  # a plug-in may raise anything; it must not end this process
        return {"failure": f"raised {describe(error)}"}
    return decision(result, describe)


def outcome(function: UserFunction, call: Message, tokenizer: Tokenizer | None, describe: Describe) -> Message:
    """Runs a reward function. Returns {"reward", "components", "log"}, or {"failure": the reason}."""
    try:
        token_ids = memoryview(call["response_token_ids"]).cast("i").tolist()
        text = call["response_text"]
        if text is None:
            text = tokenizer.decode(token_ids, skip_special_tokens=True) if tokenizer is not None else ""
        result = function(call["prompt_text"], text, token_ids, json.loads(call["verifier_json"]))
    except BaseException as error:  # a plug-in may raise anything; it must not end this process
        return {"failure": f"raised {describe(error)}"}
    return verdict(result, describe)


def _close(descriptors: list[int]) -> None:
    """Closes them once: a grandchild may reuse their numbers for its own files."""
    while descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptors.pop())


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
