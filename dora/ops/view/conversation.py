"""A recorded session for people. Its texts are untrusted: control characters are shown as escapes."""

import json
from collections.abc import Iterator
from typing import Final

from rich.text import Text

from dora.data.conversation import INPUT, SAMPLED, BranchShown, Conversation, TurnShown
from dora.ops.view.numbers import duration, measured

SPEAKER_STYLES: Final = {"prompt": "bold", SAMPLED: "bold green", INPUT: "bold cyan"}
TEXT_INDENT: Final = "    "


def conversation_lines(conversation: Conversation) -> Iterator[Text]:
    for name, value in _facts(conversation):
        yield Text.assemble((f"{name:<11}", "bold"), value)
    for branch in conversation.branches:
        yield Text()
        yield from _branch(conversation, branch)


def escaped(text: str) -> str:
    """Returns a text in which a character that is not printable is an escape, such as ``\\x1b``. Lines stay."""
    return "\n".join(
        "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)
        for line in text.split("\n")
    )


def in_a_line(text: str) -> str:
    return escaped(text).replace("\n", "\\n")


def _facts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    task = f", task {in_a_line(conversation.task_id)}" if conversation.task_id else ""
    yield "session", f"{in_a_line(conversation.session_id)} of prompt {in_a_line(conversation.prompt_id)}{task}"
    yield (
        "version",
        f"v{conversation.version}, trained in step {conversation.trained_step}, staleness {conversation.staleness}",
    )
    parts = "".join(f", {in_a_line(name)} {value:g}" for name, value in conversation.reward_components.items())
    invalid = "" if conversation.reward_valid else " (not valid: not trained on)"
    yield "reward", f"{measured(conversation.reward)}{invalid}{parts}"
    if conversation.verdict:
        yield "verdict", in_a_line(conversation.verdict)
    last_s = max(branch.finished_s for branch in conversation.branches)
    yield "time", f"{duration(last_s)} from the admission of its group {in_a_line(conversation.group_id)}"


def _branch(conversation: Conversation, branch: BranchShown) -> Iterator[Text]:
    if len(conversation.branches) > 1:
        shared = f": its first {branch.shared_prefix_tokens} tokens are in an earlier branch too"
        said = f"branch {branch.branch_index}, {in_a_line(branch.trajectory_id)}"
        yield Text(said + (shared if branch.shared_prefix_tokens else ""), "bold underline")
    for turn in branch.turns:
        is_shared = turn.first_token + len(turn.token_ids) <= branch.shared_prefix_tokens
        if branch.shared_prefix_tokens and is_shared:  # the prompt of a shared prefix, too
            continue
        yield _heading(turn)
        yield from _content(turn)
    workers = "; ".join(_segment(segment) for segment in branch.worker_history)
    tokens = _tokens(branch.length_tokens)
    ended = f"ended by {branch.finish_reason} after {duration(branch.finished_s)}, {tokens}"
    yield Text(f"{ended}: {workers}", "dim")


def _heading(turn: TurnShown) -> Text:
    number = f" {turn.turn}" if turn.turn is not None else ""
    text = Text.assemble((f"{turn.speaker}{number}", SPEAKER_STYLES[turn.speaker]))
    if turn.name:
        text.append(f" by {in_a_line(turn.name)}")
    if turn.workers:
        text.append(f" on {', '.join(map(in_a_line, turn.workers))}")
    if turn.after_s is not None:
        text.append(f" after {duration(turn.after_s)}", "dim")
    text.append(f", {_tokens(len(turn.token_ids))}", "dim")
    if turn.sampling:
        said = (f"{name} {json.dumps(value)}" for name, value in turn.sampling.items())
        text.append(f", sampled with {', '.join(said)}")
    if turn.reward is not None:
        text.append(f", reward {measured(turn.reward)}")
    return text


def _content(turn: TurnShown) -> Iterator[Text]:
    shown = " ".join(map(str, turn.token_ids)) if turn.text is None else escaped(turn.text)
    for line in shown.split("\n"):
        yield Text(TEXT_INDENT + line)


def _segment(segment: dict[str, object]) -> str:
    tokens = f"{segment['first_token']} to {segment['last_token']}"
    return f"{in_a_line(str(segment['worker_id']))} had tokens {tokens} ({segment['arrival']})"


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count != 1)}"
