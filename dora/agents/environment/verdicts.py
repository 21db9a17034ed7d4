"""Verdicts of environments that say that they are deterministic, by the content of the whole conversation."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from dora.agents.environment.protocol import End, Environment, Reply, Task

DIGEST_BYTES: Final = 32


def is_deterministic(environment: Environment) -> bool:
    """Returns whether the same task and replies always give the same messages and the same end."""
    return getattr(environment, "deterministic", False) is True


class ConversationDigest:
    """The digest of a conversation: the task, every message of the environment, every token of the policy."""

    def __init__(self, task: Task) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        self._add([task.prompt_id, task.task_id, task.text, task.verifier, task.is_evaluation])

    def told(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._add(messages)

    def replied(self, reply: Reply) -> None:
        self._add([reply.finish_reason, reply.token_ids])

    def key(self) -> bytes:
        return self._hash.digest()

    def _add(self, part: Any) -> None:
        text = json.dumps(part, sort_keys=True, default=repr).encode()
        self._hash.update(b"%d:" % len(text) + text)


class VerdictCache:
    """The ends of the latest conversations, ``entries`` at most. The one that was used longest ago goes first."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._ends: OrderedDict[bytes, End] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, key: bytes) -> End | None:
        found = self._ends.get(key)
        if found is not None:
            self._ends.move_to_end(key)
        return found

    def put(self, key: bytes, end: End) -> None:
        if not self._entries:
            return
        self._ends[key] = end
        self._ends.move_to_end(key)
        while len(self._ends) > self._entries:
            self._ends.popitem(last=False)
