"""Anthropic's ``/v1/messages``, as a translation onto chats. Source: the Anthropic API reference, "Messages"."""

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

from aiohttp import web

from dora.agents.chat.reply import ChatReply
from dora.agents.front.errors import anthropic_body
from dora.agents.front.http import event, read_request, streamed, whole
from dora.agents.front.protocols.chat import reply_of
from dora.agents.front.protocols.parts import joined_text, listed
from dora.agents.front.request import MODEL, chat_request
from dora.agents.front.turns import RunningTurn
from dora.errors import MISSING, InvalidValue, one_of

# Fields, by their names in OpenAI's chats.
_SAME: Final[Mapping[str, str]] = {
    "model": "model",
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stream": "stream",
    "metadata": "metadata",
    "service_tier": "service_tier",
}
_OTHERS: Final = ("messages", "system", "tools", "tool_choice", "thinking")
_NO_EFFECT: Final = ("context_management", "output_config", "betas", "container", "inference_geo", "cache_control")
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "abort": "max_tokens"}


async def messages(request: web.Request) -> web.StreamResponse:
    received = await read_request(request)
    requested = chat_request(chat_of(received.body))
    (turn,) = await received.turns([requested])
    head = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": f"{MODEL}-v{turn.version}",
    }
    if requested.stream:
        return await streamed(request, received, turn.version, _events(head, turn), anthropic_body)
    await turn.ended()
    reply = {**head, "content": list(_blocks(reply_of(turn))), **_end(turn), "usage": _usage(turn)}
    return await whole(request, received, turn.version, reply)


async def count_tokens(request: web.Request) -> web.Response:
    """Counts the tokens of a chat as a prompt of its own."""
    received = await read_request(request)
    requested = chat_request(chat_of(received.body))
    return web.json_response({"input_tokens": len((await received.gateway.rendered(requested)).token_ids)})


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a body as OpenAI's chats have it. Raises InvalidValue, naming the field."""
    for name in body:
        if name not in (*_SAME, *_OTHERS, *_NO_EFFECT):
            raise InvalidValue(name, body[name], one_of(name, (*_SAME, *_OTHERS)), "is not a field of this route")
    found = {own: body[name] for name, own in _SAME.items() if body.get(name) is not None}
    said = body.get("messages", MISSING)
    if not isinstance(said, list):
        raise InvalidValue("messages", said, "a list of messages")
    system = joined_text(body.get("system") or "", "system")
    chat = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(said):
        chat += _translated(message, f"messages[{number}]")
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(listed(body.get("tools"), "tools"))]
    choice, thinking = body.get("tool_choice") or {"type": "auto"}, body.get("thinking") or {}
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none"):
        raise InvalidValue("tool_choice", choice, "of type auto or none", why="cannot be enforced without a grammar")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        found["chat_template_kwargs"] = {"enable_thinking": False}
    return {**found, "messages": chat, "tools": tools, "tool_choice": choice["type"]}


def _translated(message: Any, field: str) -> Iterator[dict[str, Any]]:
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise InvalidValue(field, message, "an object with a role (user or assistant) and a content")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise InvalidValue(f"{field}.content", content, "a text or a list of blocks")
    texts, calls, reasoning = [], [], []
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                texts.append(joined_text([block], field))
            case "thinking":
                reasoning.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                continue
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                result = joined_text(block.get("content") or "", f"{field}.content[{number}]")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            case other:
                allowed = "text, thinking, tool_use or tool_result"
                raise InvalidValue(f"{field}.content[{number}].type", other, allowed)
    if texts or calls or message["role"] == "assistant":
        found: dict[str, Any] = {"role": message["role"], "content": "".join(texts)}
        yield {
            **found,
            **({"tool_calls": calls} if calls else {}),
            **({"reasoning": "".join(reasoning)} if reasoning else {}),
        }


def _tool(tool: Any, field: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or tool.get("type", "custom") != "custom":
        raise InvalidValue(field, tool, "a tool of the client: an object with name, description and input_schema")
    function = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def _blocks(reply: ChatReply) -> Iterator[dict[str, Any]]:
    if reply.reasoning is not None:
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": ""}
    if reply.content or not reply.tool_calls:
        yield {"type": "text", "text": reply.content}
    for call in reply.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.value()}


def _end(turn: RunningTurn) -> dict[str, Any]:
    if turn.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stop}
    is_call = turn.finish_reason == "stop" and bool(reply_of(turn).tool_calls)
    reason = "tool_use" if is_call else _STOP_REASONS[str(turn.finish_reason)]
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(turn: RunningTurn) -> dict[str, int]:
    return {"input_tokens": len(turn.prompt_token_ids), "output_tokens": len(turn.token_ids)}


async def _events(head: Mapping[str, Any], turn: RunningTurn) -> AsyncIterator[bytes]:
    started = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(turn)}
    blocks: list[str] = []
    is_begun = False
    async for chunk in turn.chunks():
        if not is_begun:
            is_begun = True
            yield _event("message_start", message=started)
        for kind, text in (("thinking", chunk.piece.reasoning), ("text", chunk.piece.content)):
            if not text:
                continue
            if not blocks or blocks[-1] != kind:
                for each in _next_block(blocks, kind, {"type": kind, kind: ""}):
                    yield each
            delta = {"type": f"{kind}_delta", kind: text}
            yield _event("content_block_delta", index=len(blocks) - 1, delta=delta)
    for call in reply_of(turn).tool_calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        for each in _next_block(blocks, "tool_use", block):
            yield each
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield _event("content_block_delta", index=len(blocks) - 1, delta=delta)
    if blocks:
        yield _event("content_block_stop", index=len(blocks) - 1)
    yield _event("message_delta", delta=_end(turn), usage=_usage(turn))
    yield _event("message_stop")


def _next_block(blocks: list[str], kind: str, block: Mapping[str, Any]) -> Sequence[bytes]:
    ended = [_event("content_block_stop", index=len(blocks) - 1)] if blocks else []
    blocks.append(kind)
    return [*ended, _event("content_block_start", index=len(blocks) - 1, content_block=block)]


def _event(name: str, **parts: Any) -> bytes:
    return event({"type": name, **parts}, name)
