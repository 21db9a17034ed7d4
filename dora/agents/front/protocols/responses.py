"""OpenAI's ``/v1/responses``, as a translation onto chats. Source: the OpenAI API reference, "Responses"."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

from aiohttp import web

from dora.agents.chat.reply import ChatReply
from dora.agents.front.http import event, read_request, streamed, whole
from dora.agents.front.protocols.chat import reply_of
from dora.agents.front.protocols.parts import joined_text, listed
from dora.agents.front.request import MODEL, chat_request
from dora.agents.front.turns import RunningTurn
from dora.errors import MISSING, InvalidValue, one_of

# Fields, by their names in OpenAI's chats.
_SAME: Final[Mapping[str, str]] = {
    **{name: name for name in ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "tool_choice")},
    **{name: name for name in ("metadata", "store", "user", "service_tier", "safety_identifier", "prompt_cache_key")},
    "max_output_tokens": "max_completion_tokens",
}
_OTHERS: Final = ("input", "instructions", "tools", "reasoning", "text")
# Values that say no more than that a field is not used.
_UNUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "truncation": (None, "disabled"),
    "background": (None, False),
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "max_tool_calls": (None,),
    "top_logprobs": (None, 0),
    "include": (None, [], ["reasoning.encrypted_content"]),
    "stream_options": (None,),
}


async def responses(request: web.Request) -> web.StreamResponse:
    received = await read_request(request)
    requested = chat_request(chat_of(received.body))
    (turn,) = await received.turns([requested])
    head = _head(received.body, turn)
    if requested.stream:
        return await streamed(request, received, turn.version, _events(head, turn))
    await turn.ended()
    return await whole(request, received, turn.version, _whole(head, turn))


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a body as OpenAI's chats have it. Raises InvalidValue, naming the field."""
    for name, value in body.items():
        if name in _UNUSED:
            if value not in _UNUSED[name]:
                why = "is not offered: send the whole input, of which no token is sampled or prefilled again"
                raise InvalidValue(name, value, "left out", why if name == "previous_response_id" else "is not offered")
        elif name not in (*_SAME, *_OTHERS):
            raise InvalidValue(name, value, one_of(name, (*_SAME, *_OTHERS)), "is not a field of this route")
    found = {own: body[name] for name, own in _SAME.items() if body.get(name) is not None}
    said, instructions = body.get("input", MISSING), body.get("instructions")
    chat: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(said, str):
        chat.append({"role": "user", "content": said})
    elif isinstance(said, list):
        chat += _translated(said)
    else:
        raise InvalidValue("input", said, "a text or a list of items")
    text = body.get("text") or {}
    if not isinstance(text, dict) or (text.get("format") or {"type": "text"}) != {"type": "text"}:
        why = "is structured output: a grammar's state cannot move with a request"
        raise InvalidValue("text.format", text, 'left out, or {"type": "text"}', why)
    reasoning = body.get("reasoning") or {}
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        found["reasoning_effort"] = reasoning["effort"]
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(listed(body.get("tools"), "tools"))]
    return {**found, "messages": chat, "tools": tools}


def _translated(items: list[Any]) -> Iterator[dict[str, Any]]:
    answer: dict[str, Any] | None = None
    for number, item in enumerate(items):
        field = f"input[{number}]"
        if not isinstance(item, dict):
            raise InvalidValue(field, item, "an object")
        kind = item.get("type", "message")
        if kind == "reasoning" or kind == "function_call" or (kind == "message" and item.get("role") == "assistant"):
            answer = {"role": "assistant", "content": ""} if answer is None else answer
            _add(answer, kind, item, field)
            continue
        if answer is not None:
            yield answer
            answer = None
        if kind == "message":
            yield {"role": item.get("role"), "content": joined_text(item.get("content"), f"{field}.content")}
        elif kind == "function_call_output":
            output = joined_text(item.get("output"), f"{field}.output")
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        else:
            allowed = "message, reasoning, function_call or function_call_output"
            raise InvalidValue(f"{field}.type", kind, allowed)
    if answer is not None:
        yield answer


def _add(answer: dict[str, Any], kind: str, item: Mapping[str, Any], field: str) -> None:
    if kind == "message":
        answer["content"] += joined_text(item.get("content"), f"{field}.content")
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)
    else:
        answer["reasoning"] = joined_text(item.get("content") or [], f"{field}.content")


def _tool(tool: Any, field: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise InvalidValue(field, tool, "a function, with name and parameters: the service runs no tools")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _head(body: Mapping[str, Any], turn: RunningTurn) -> dict[str, Any]:
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": f"{MODEL}-v{turn.version}",
        "output": [],
        "parallel_tool_calls": True,
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "usage": None,
    }


def _whole(head: Mapping[str, Any], turn: RunningTurn) -> dict[str, Any]:
    input_tokens, sampled = len(turn.prompt_token_ids), len(turn.token_ids)
    is_cut = turn.finish_reason != "stop"
    return {
        **head,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": list(_items(str(head["id"]), reply_of(turn))),
        "usage": {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input_tokens + sampled,
        },
    }


def _items(response_id: str, reply: ChatReply) -> Iterator[dict[str, Any]]:
    name = response_id.removeprefix("resp_")
    if reply.reasoning is not None:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        yield {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content, "status": "completed"}
    if reply.content or not reply.tool_calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed"}
        yield {**message, "content": [part]}
    for number, call in enumerate(reply.tool_calls):
        shared = {"type": "function_call", "id": f"fc_{name}_{number}", "call_id": call.id, "status": "completed"}
        yield {**shared, "name": call.name, "arguments": call.arguments}


async def _events(head: dict[str, Any], turn: RunningTurn) -> AsyncIterator[bytes]:
    told = _Told(str(head["id"]).removeprefix("resp_"))
    is_begun = False
    async for chunk in turn.chunks():
        if not is_begun:
            is_begun = True
            yield told.event("created", response=head)
            yield told.event("in_progress", response=head)
        for kind, text in (("reasoning", chunk.piece.reasoning), ("message", chunk.piece.content)):
            for each in told.text(kind, text) if text else ():
                yield each
    reply = _whole(head, turn)
    for index, item in enumerate(reply["output"]):
        for each in told.item(index, item):
            yield each
    yield told.event(reply["status"], response=reply)


class _Told:
    def __init__(self, name: str) -> None:
        self._name = name
        self._number = -1
        self._begun: list[str] = []  # the kinds of the items whose text has come

    def event(self, kind: str, /, **parts: Any) -> bytes:
        self._number += 1
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": self._number, **parts}, kind)

    def text(self, kind: str, text: str) -> Iterator[bytes]:
        is_message = kind == "message"
        item_id = f"{'msg' if is_message else 'rs'}_{self._name}"
        if kind not in self._begun:
            self._begun.append(kind)
            yield from self._begin(kind, {"type": kind, "id": item_id, "status": "in_progress", "content": []})
        place = {"item_id": item_id, "output_index": self._begun.index(kind), "content_index": 0}
        if is_message:
            yield self.event("output_text.delta", **place, delta=text, logprobs=[])
        else:
            yield self.event("reasoning_text.delta", **place, delta=text)

    def _begin(self, kind: str, item: dict[str, Any]) -> Iterator[bytes]:
        index = len(self._begun) - 1
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield self.event("output_item.added", output_index=index, item={**item, **own})
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self.event("content_part.added", item_id=item["id"], output_index=index, content_index=0, part=part)

    def item(self, index: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] not in self._begun:
            begun = {**item, "status": "in_progress", **({"arguments": ""} if "arguments" in item else {})}
            yield self.event("output_item.added", output_index=index, item=begun)
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield self.event("function_call_arguments.delta", **place, delta=arguments)
            yield self.event("function_call_arguments.done", **place, arguments=arguments, name=item["name"])
        elif item["type"] == "message":
            part = item["content"][0]
            yield self.event("output_text.done", **place, content_index=0, text=part["text"], logprobs=[])
            yield self.event("content_part.done", **place, content_index=0, part=part)
        yield self.event("output_item.done", output_index=index, item=item)
