"""Chats over sessions: no token of a history is given twice or tokenised anew, whatever templates and clients do."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from dora.agents.chat.message import checked_chat
from dora.agents.chat.reply import ReplyParser
from dora.agents.chat.text import TextStream
from dora.agents.chat.tool_calls import FORMATS
from dora.agents.chat.tree import BRANCH, NEW, SessionTree
from dora.errors import InvalidValue
from tests.refusals import refused
from tests.unit.chat_templates import STYLES
from tests.unit.chats import TOOLS, Conversation, renderer

TURNS = 20
CONVERSATIONS = 4
MANY = 100  # of each template


@pytest.mark.parametrize("name", STYLES)
def test_no_conversation_breaks(name: str) -> None:
    converse(name, range(CONVERSATIONS))


@pytest.mark.full
@pytest.mark.parametrize("name", STYLES)
def test_no_conversation_of_many_breaks(name: str) -> None:
    converse(name, range(CONVERSATIONS, MANY))


def converse(name: str, seeds: range) -> None:
    for seed in seeds:
        conversation = Conversation(name, seed)
        for _ in range(TURNS):
            conversation.exchange()
        assert not conversation.tree.prefix_breaks
        assert len(conversation.tree.branches) == 1


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if style.keeps])
def test_a_template_that_changes_no_history_is_followed_to_the_letter(name: str) -> None:
    """The text of all tokens of a session is that of its chat."""
    chat, rendering = renderer(name)
    conversation = Conversation(name, 0)
    messages, tree = conversation.messages, conversation.tree
    for number in range(5):
        messages.append({"role": "user", "content": f"Question {number}?"})
        ask = tree.ask(messages)
        message = {"role": "assistant", "content": f"It is {number}."}
        sampled = chat.encode(message["content"] + chat.style.end, special_tokens=False)
        tree.answered(ask, sampled, message)
        text = rendering.prompt([*messages, message, {"role": "user", "content": "?"}], None, {}).text
        messages.append(message)
        assert text.startswith(chat.decode(tree.branches[0].token_ids, special_tokens=True))


def answered(conversation: Conversation, content: str = "It is 4.") -> None:
    """One exchange of plain texts."""
    conversation.messages.append({"role": "user", "content": "?"})
    ask = conversation.tree.ask(conversation.messages)
    message = {"role": "assistant", "content": content}
    sampled = conversation.chat.encode(content + conversation.style.end, special_tokens=False)
    conversation.tree.answered(ask, sampled, message)
    conversation.messages.append(message)


def asked(name: str = "chatml", turns: int = 3) -> Conversation:
    conversation = Conversation(name, 0)
    for number in range(turns):
        answered(conversation, f"It is {number}.")
    return conversation


def test_a_changed_answer_forks_at_the_answer_before() -> None:
    conversation = asked()
    tree, messages = conversation.tree, conversation.messages
    messages[3] = {"role": "assistant", "content": "It is mine."}
    ask = tree.ask([*messages, {"role": "user", "content": "?"}])
    assert ask.begins and ask.reason == "history" and tree.prefix_breaks == {"history": 1}
    assert ask.origin == (0, tree.branches[0].turns[0][1])
    assert conversation.chat.decode(ask.inputs).count("It is mine.") == 1
    assert len(tree.branches[0].turns) == 3 and tree.branches[1].turns == tree.branches[0].turns[:1]


def test_a_changed_beginning_gives_all_tokens_anew() -> None:
    conversation = asked()
    changed = [{"role": "user", "content": "Other?"}, *conversation.messages[1:], {"role": "user", "content": "?"}]
    ask = conversation.tree.ask(changed)
    assert ask.begins and ask.origin is None and ask.reason == "history"


def test_other_tools_give_all_tokens_anew() -> None:
    conversation = asked("qwen2.5")
    ask = conversation.tree.ask([*conversation.messages, {"role": "user", "content": "?"}], TOOLS)
    assert ask.begins and ask.origin is None and ask.reason == "tools"
    assert conversation.tree.prefix_breaks == {"tools": 1}


def test_a_second_continuation_is_a_branch_and_no_break() -> None:
    conversation = asked()
    tree, messages = conversation.tree, [*conversation.messages, {"role": "user", "content": "?"}]
    first, second = tree.ask(messages), tree.ask(messages)
    assert not first.begins and second.begins and second.reason == BRANCH and first.inputs == second.inputs
    assert second.origin == (0, len(tree.branches[0].token_ids)) and not tree.prefix_breaks
    tree.answered(first, [5, 6], {"role": "assistant", "content": "x"})
    tree.answered(second, [7], {"role": "assistant", "content": "y"})
    later = [*messages, {"role": "assistant", "content": "y"}, {"role": "user", "content": "?"}]
    assert tree.ask(later).branch == 1
    assert tree.ask([*messages[:2], {"role": "user", "content": "Back."}]).origin == (0, tree.branches[0].turns[0][1])
    assert tree.ask([{"role": "user", "content": "Another chat."}]).reason == NEW and not tree.prefix_breaks


def test_a_failed_turn_leaves_its_history() -> None:
    conversation = asked()
    tree, messages = conversation.tree, [*conversation.messages, {"role": "user", "content": "?"}]
    tree.dropped(tree.ask(messages), is_known=False)
    tree.dropped(again := tree.ask(messages))
    assert not again.begins
    after = tree.ask(messages)
    assert after.begins and after.reason == BRANCH and after.inputs == again.inputs


def test_an_unproven_suffix_is_counted_and_keeps_what_it_can() -> None:
    """The template numbers its answers from the end: no suffix is independent of what follows."""
    template = (
        "{% for m in messages %}{{ loop.revindex }}{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ '</s>' + ('?' if loop.last else '..') }}{% endif %}{% endfor %}"
    )
    conversation = Conversation("plain", 0)
    conversation.chat.style = replace(conversation.style, template=template)
    answered(conversation)
    answered(conversation)
    assert conversation.tree.prefix_breaks == {"template": 1}
    assert conversation.tree.branches[1].turns[0] != conversation.tree.branches[0].turns[0]


def test_token_ids_continue_the_branch_that_they_begin_with() -> None:
    tree = SessionTree(renderer("chatml")[1])
    first = tree.ask_tokens([1, 2, 3])
    assert (first.branch, first.inputs, first.reason) == (0, (1, 2, 3), "")
    tree.answered(first, [4, 5])
    second = tree.ask_tokens([1, 2, 3, 4, 5, 6])
    assert (second.branch, second.inputs, second.begins) == (0, (6,), False)
    tree.answered(second, [7, 8])
    rewound = tree.ask_tokens([1, 2, 3, 4, 5, 9])
    assert rewound.begins and rewound.origin == (0, 5) and rewound.inputs == (9,) and rewound.reason == BRANCH
    tree.answered(rewound, [10])
    assert not tree.prefix_breaks
    cut = tree.ask_tokens([1, 2, 3, 4, 5, 6, 7, 99, 9])
    assert cut.origin == (0, 5) and cut.inputs == (6, 7, 99, 9) and cut.reason == "tokens"
    assert tree.prefix_breaks == {"tokens": 1}
    assert tree.ask_tokens([1, 2, 3, 4, 5, 6, 7, 8]).inputs == (6, 7, 8)  # a cut-off answer that goes on
    assert tree.ask_tokens([50]).reason == NEW


PARTS = [
    *('<tool_call>\n{"name": "f", "arguments": {"a": false}}\n</tool_call>', '[TOOL_CALLS]f{"a": 1}'),
    *(
        '[TOOL_CALLS][{"name": "g"}]',
        '</think>{"name": "f", "parameters": {}}',
        '{"name": "f", "arguments": {"a": false}}',
    ),
    *(
        "<function=f>\n<parameter=a>\n1.0\n</parameter>\n</function>",
        '{"name": "f", "parameters": {}}',
        "; ",
        "<",
        "\n",
    ),
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        " text ",
        "<thi",
        "[TOOL",
    ),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("thinks", [False, True])
def test_the_pieces_of_a_reply_are_the_reply(name: str, thinks: bool) -> None:
    chance = random.Random(name)
    calls = 0
    for _ in range(1000):
        text = "".join(chance.choices(PARTS, k=chance.randint(1, 7)))
        parser = ReplyParser(FORMATS[name], is_thinking=thinks)
        pieces, at = [], 0
        while at < len(text):
            size = chance.randint(1, 9)
            pieces.append(parser.push(text[at : at + size]))
            at += size
        last, reply = parser.end()
        assert reply == ReplyParser(FORMATS[name], is_thinking=thinks).parse(text)
        assert "".join(each.content for each in [*pieces, last]) == reply.content, text
        assert "".join(each.reasoning for each in [*pieces, last]) == (reply.reasoning or ""), text
        calls += len(reply.tool_calls)
    assert calls > 10


@pytest.mark.parametrize(
    ("name", "text", "content", "expected"),
    [
        ("hermes", 'Yes.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Yes.", {"a": 1}),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", {"a": 1}),
        (
            "hermes",
            "<tool_call>\n<function=f>\n<parameter=a>\nx = 1\n</parameter>\n</function>\n</tool_call>",
            "",
            {"a": "x = 1"},
        ),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": null}}', "", {"a": None}),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": []}}]', "", {"a": []}),
        ("mistral", 'Yes.[TOOL_CALLS]f[ARGS]{"a": 2}', "Yes.", {"a": 2}),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', None, None),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, None),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', None, None),
        ("hermes", "<tool_call><function=f>text</function></tool_call>", None, None),
        ("hermes", '<tool_call>{"name": "f"}', None, None),
        ("hermes", "<think>\n<tool_call>{}</tool_call>", "", None),
        ("llama", 'So: {"name": "f", "parameters": {}}', None, None),
        ("llama", '{"name": "f", "parameters": {}} and', None, None),
        ("mistral", "[TOOL_CALLS]f", None, None),
    ],
)
def test_only_well_formed_calls_are_calls(name: str, text: str, content: str | None, expected: object) -> None:
    """Anything else stays text."""
    reply = ReplyParser(FORMATS[name], new_id=lambda: "id").parse(text)
    assert reply.content == (text if content is None else content)
    assert [json.loads(call.arguments) for call in reply.tool_calls] == ([] if expected is None else [expected])
    assert all((call.name, call.id) == ("f", "id") for call in reply.tool_calls)


def test_text_comes_in_whole_characters() -> None:
    chat, _ = renderer("chatml")
    text = "Zoë 日本 🙂 <think> \n\n"
    token_ids = [token_id for each in text for token_id in chat.encode(each)]
    stream = TextStream(chat)
    pieces = [stream.push([token_id]) for token_id in token_ids]
    assert "".join(pieces) + stream.end() == text and all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    broken = TextStream(chat)
    assert broken.push(chat.encode("日")[:1]) == "" and broken.end() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "user"}], "messages"),
        ([{"role": "root", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], "messages[1].role"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_a_malformed_chat_is_refused_by_name(messages: object, field: str) -> None:
    with refused(InvalidValue, field=field):
        checked_chat(messages)


def test_a_restored_branch_goes_on_where_its_text_does() -> None:
    """Its tokens are not those that its tokenizer would choose, and its messages are not known."""
    before = asked("qwen2.5")
    sampled = [token_id for each in "It is 3." for token_id in before.chat.encode(each)] + [before.chat.ends()[0]]
    messages = [*before.messages, {"role": "user", "content": "?"}]
    ask = before.tree.ask(messages)
    tokens = [*before.tree.branches[0].token_ids, *ask.inputs, *sampled]
    tree = SessionTree(before.renderer)
    tree.restored(tokens, len(tokens) - len(sampled))
    more = [*messages, {"role": "assistant", "content": "It is 3."}, {"role": "user", "content": "So?"}]
    again = tree.ask(more)
    assert (again.branch, again.begins, again.reason) == (0, False, "") and not tree.prefix_breaks
    assert (
        before.chat.decode([*tokens, *again.inputs], special_tokens=True) == before.renderer.prompt(more, None, {}).text
    )


PARAMETERS: Any = {
    "type": "object",
    "$defs": {"name": {"type": "string"}},
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "choice": {"enum": ["1", "2"]},
        "known": {"$ref": "#/$defs/name"},
        "loop": {"$ref": "#/properties/loop"},
        "odd": {"type": {}, "enum": 5, "anyOf": "x"},
        "any": {},
    },
}


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        *(
            ("text", each, each)
            for each in ("12345", "true", "null", "None", '"quoted"', "[1]", "1e5", '{"a": 1}', "a b")
        ),
        *(("maybe", "null", None), ("maybe", "12", "12"), ("either", "12", 12), ("either", "12.5", "12.5")),
        *(("count", "12", 12), ("size", "12", 12), ("size", "1.5", 1.5), ("count", "many", "many")),
        *(("flag", "true", True), ("flag", "False", False), ("items", '[1, "a"]', [1, "a"]), ("items", "a", "a")),
        *(("choice", "1", "1"), ("known", "7", "7"), ("loop", "7", 7), ("odd", "7", 7), ("any", '"x"', "x")),
        *(("unlisted", "7", 7), ("unlisted", "None", "None"), ("unlisted", "null", None)),
    ],
)
def test_a_parameter_has_the_type_of_its_tools_schema(name: str, written: str, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    text = f"<tool_call>\n<function=f>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = ReplyParser(FORMATS["hermes"], tools).parse(text).tool_calls
    assert call.value() == {name: value} and type(call.value()[name]) is type(value)
    odds: tuple[Any, ...] = (None, [], "x", {"properties": 5}, {"properties": {name: 5}})
    for odd in odds:
        tools[0]["function"] = {"name": "f", "parameters": odd}
        assert ReplyParser(FORMATS["hermes"], tools).parse(text).tool_calls
