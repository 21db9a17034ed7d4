"""The client that submits prompts."""

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dora.client.connection import Client, check_count
from dora.client.evaluation import Evaluation
from dora.client.periodic import EvaluationSeries
from dora.data.strict_json import check_text
from dora.data.types import Prompt
from dora.errors import InvalidValue, one_of
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import prompt_to_wire
from dora.rpc.dora_pb2_grpc import PromptsStub

_FORMS: Final = ("prompt", "prompt_token_ids", "messages")
_FIELDS: Final = (
    *_FORMS,
    "prompt_id",
    "task_id",
    "answer",
    "verifier",
    "group_size",
    "group_size_min",
    "sampling",
    "priority",
    "environment",
)
_OTHER_NAMES: Final = {"text": "prompt", "token_ids": "prompt_token_ids"}


@dataclass(frozen=True, slots=True)
class Submitted:
    """The result of submitting a batch of prompts."""

    accepted: int
    queue_free: int  # free places in the queue


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The result of cancelling a prompt or group."""

    name: str  # as given
    state: str  # dequeued, cancelled, before (it already was), taken (a step has it: it stays), unknown
    group_id: str  # empty without a group


class Prompts(Client):
    """Submits, evaluates and cancels prompts at a service."""

    async def submit(self, prompts: Iterable[Prompt | str | Mapping[str, Any]]) -> Submitted:
        """Queues all prompts or none.

        A prompt is a Prompt, a text, or a mapping with the fields of a row of a prompts file: one of ``prompt`` (or
        ``text``), ``messages`` (a chat) and ``prompt_token_ids`` (or ``token_ids``); then ``prompt_id`` (default: a new
        one), ``task_id``, ``answer``, ``verifier``, ``group_size``, ``group_size_min``, ``sampling``, ``priority`` and
        ``environment``. The service tokenizes texts and chats.

        Raises InvalidValue for a refused prompt (for example, one that is too long), Conflict for a duplicate id,
        LimitExceeded if the queue is full or the batch exceeds the message limit, Unauthenticated, ServiceUnavailable.
        """
        if isinstance(prompts, str | Mapping):
            raise InvalidValue("prompts", prompts, "a list of prompts, even for a single one")
        request = pb.SubmitRequest(prompts=[prompt_message(prompt) for prompt in prompts])
        reply = await self._connection.call(self._connection.stub(PromptsStub).Submit, request)
        return Submitted(reply.accepted, reply.queue_free)

    def evaluate(
        self,
        prompts: Iterable[Prompt | str | Mapping[str, Any]],
        *,
        version: int | None = None,
        share: float = 0.0,
        name: str = "",
    ) -> Evaluation:
        """Samples prompts, given as in :meth:`submit`, under one version beside training. No step trains on them.

        ``version`` is a live version, or None for the newest that workers may load. ``share`` of that version's slots
        and KV is allotted to the evaluation (0 to 0.5, over all evaluations); with 0 it gets only slots that training
        leaves idle. ``name`` is shown to operators.

        Iterate over the result, or await its ``whole()``. That raises InvalidValue for a refused prompt, NotFound for a
        version that is not live, Conflict for a duplicate id or while the service drains, LimitExceeded for too many
        prompts or evaluations, Unauthenticated, ServiceUnavailable.
        """
        if isinstance(prompts, str | Mapping):
            raise InvalidValue("prompts", prompts, "a list of prompts, even for a single one")
        if version is not None:
            check_count("version", version)
        if type(share) not in (int, float):
            raise InvalidValue("share", share, "a number from 0 to 0.5")
        check_text(name, "name")
        wired = [prompt_message(prompt) for prompt in prompts]
        request = pb.EvaluateRequest(prompts=wired, version=version, share=share, name=name)
        return Evaluation(self._connection, request)

    def every(
        self,
        steps: int,
        prompts: Iterable[Prompt | str | Mapping[str, Any]],
        *,
        share: float = 0.0,
        name: str = "",
    ) -> EvaluationSeries:
        """Evaluates every ``steps``-th version on the same prompts, given as in :meth:`evaluate`.

        The trainer's loop calls ``await series.at(step.number)`` for each step, and ``await series.finish()`` at the
        end. Raises InvalidValue for a number of steps below 1.
        """
        if isinstance(prompts, str | Mapping):
            raise InvalidValue("prompts", prompts, "a list of prompts, also where it is one")
        rows = list(prompts)
        return EvaluationSeries(
            steps, lambda version: self.evaluate(rows, version=version, share=share, name=f"{name} v{version}".strip())
        )

    async def end(self) -> int:
        """Ends submissions for all clients. The trainer's last step ends once all prompts are sampled.

        Returns the number of queued prompts. May be repeated. The service's own prompt source continues to its end.
        """
        reply = await self._connection.call(self._connection.stub(PromptsStub).End, pb.EndRequest())
        return reply.prompts_left

    async def cancel(self, ids: Iterable[str], reason: str = "") -> list[Cancelled]:
        """Cancels prompts by their ids or their groups' ids. Returns the results in the same order.

        A queued prompt leaves the queue. An admitted group is cancelled and recorded with the reason. A group that a
        step has taken stays. May be repeated. Raises InvalidValue for more than 4,096 ids.
        """
        if isinstance(ids, str):
            raise InvalidValue("ids", ids, "a list of ids, even for a single one")
        request = pb.CancelRequest(ids=ids, reason=reason)
        reply = await self._connection.call(self._connection.stub(PromptsStub).Cancel, request)
        return [Cancelled(outcome.id, outcome.state, outcome.group_id) for outcome in reply.outcomes]


def prompt_message(prompt: Prompt | str | Mapping[str, Any]) -> pb.Prompt:
    """Returns the message of a prompt in any of its forms. Raises InvalidValue for values of other types."""
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return _of_fields(prompt)
    if not isinstance(prompt, Prompt):
        raise InvalidValue("prompt", prompt, "a dora.Prompt, a text or a mapping")
    try:
        return prompt_to_wire(prompt)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValue("prompt", prompt, f"a Prompt with fields of the declared types ({error})") from error


def _of_fields(record: Mapping[str, Any]) -> pb.Prompt:
    for unknown in sorted(set(record) - set(_FIELDS) - set(_OTHER_NAMES), key=str):
        raise InvalidValue(f"prompt: {unknown}", record[unknown], one_of(str(unknown), _FIELDS))
    forms = [name for name in (*_FORMS, *_OTHER_NAMES) if name in record]
    if len(forms) != 1:
        raise InvalidValue("prompt", forms, f"exactly one of {', '.join(_FORMS)}")
    record = {_OTHER_NAMES.get(name, name): value for name, value in record.items()}
    try:
        verifier = dict(record.get("verifier", {}))
        if "answer" in record:
            verifier["answer"] = record["answer"]
        message = prompt_to_wire(
            Prompt(
                prompt_id=record.get("prompt_id", uuid.uuid4().hex),
                task_id=record.get("task_id", ""),
                token_ids=tuple(record.get("prompt_token_ids", ())),
                text=record.get("prompt", ""),
                group_size=record.get("group_size", 0),
                sampling=record.get("sampling", {}),
                verifier_json=json.dumps(verifier),
                priority=record.get("priority", 0),
                environment=record.get("environment", ""),
                group_size_min=record.get("group_size_min", 0),
            )
        )
        if "messages" in record:
            message.messages_json = json.dumps(record["messages"])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidValue("prompt", dict(record), f"a mapping with JSON values ({error})") from error
    return message
