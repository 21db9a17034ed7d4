"""The branches of one session, and which of them a request continues."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from dora.agents.chat.message import Message, context_key, key_of
from dora.agents.chat.rendering import ChatRenderer, Rendered, Tools, Unproven

# Why the tokens of a history had to be given anew: a key of ``prefix_breaks``, and its meaning.
BREAKS: Final[Mapping[str, str]] = {
    "history": "the client changed an answer, or a message before one",
    "tools": "the client changed the tools or the template's options",
    "template": "the chat template does not prove what follows an answer",
    "boundary": "the tokenizer does not prove where the new tokens begin",
    "tokens": "the client's token ids differ within an answer",
}
_TEXTS_MAX: Final = 8  # branches whose texts are compared with a chat that has no known answer
BRANCH: Final = "branch"  # another continuation of a known place
NEW: Final = "new"  # a chat without an answer of this session


class BranchPlace(NamedTuple):
    """The end of an answer: the first ``tokens`` tokens of a branch."""

    branch: int
    tokens: int


@dataclass(slots=True, eq=False)
class _Node:
    """A message of a chat. ``place`` is its end if it is an answer of this session."""

    place: BranchPlace | None = None
    children: dict[str, list["_Node"]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn: ``inputs`` follows the tokens of ``branch``.

    If it ``begins``, the branch is new, with the tokens of ``origin``, if any. ``reason`` says why: a key of BREAKS,
    BRANCH or NEW, or empty for a session's first branch.
    """

    branch: int
    inputs: tuple[int, ...]
    begins: bool = False
    origin: BranchPlace | None = None
    reason: str = ""
    is_thinking: bool = False  # the template has opened the reasoning of the answer
    _parent: _Node | None = field(default=None, repr=False, compare=False)
    _keys: tuple[str, ...] = field(default=(), repr=False, compare=False)


@dataclass(slots=True)
class Branch:
    """The tokens of one branch. ``turns`` has (first, one after the last) of each answer."""

    token_ids: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    is_open: bool = True  # no turn is under way, and none has failed

    def until(self, tokens: int) -> "Branch":
        return Branch(self.token_ids[:tokens], [turn for turn in self.turns if turn[1] <= tokens])

    def common(self, token_ids: np.ndarray[Any, Any]) -> int:
        """Returns the number of tokens at its beginning that are those of ``token_ids``."""
        count = min(len(self.token_ids), len(token_ids))
        differs = np.flatnonzero(np.asarray(self.token_ids[:count], np.int32) != token_ids[:count])
        return int(differs[0]) if len(differs) else count


@dataclass(slots=True, eq=False)
class Plan:
    """A chat, and its session as it stood when the chat came."""

    renderer: ChatRenderer
    messages: Sequence[Message]
    tools: Tools | None
    options: Mapping[str, Any]
    context: str
    keys: tuple[str, ...]
    root: _Node
    parent: _Node  # the last known answer among the messages
    count: int  # of the messages up to it
    sampled: list[int] | None  # its tokens; None: there is none
    tips: Sequence[tuple[BranchPlace, list[int], list[int]]]
    reason: str
    prompt: Rendered | None = None
    suffix: Rendered | None = None  # after that answer
    same: tuple[BranchPlace, Rendered] | None = (
        None  # the branch whose text the prompt begins with, and what follows it
    )

    @property
    def is_rendered(self) -> bool:
        return self.prompt is not None and self.sampled is None and not self.tips

    def rendered(self) -> "Plan":
        """Renders the new messages. Changes no session, so another thread may do it. Raises as ``ChatRenderer``."""
        if self.sampled is not None:
            history, new = self.messages[: self.count], self.messages[self.count :]
            try:
                self.suffix = self.renderer.suffix(history, new, self.tools, self.options, self.sampled)
                return self
            except Unproven as unproven:
                self.reason = unproven.reason
        self.prompt = self.prompt or self.renderer.prompt(self.messages, self.tools, self.options)
        for place, token_ids, sampled in self.tips:
            rest = self.renderer.following(self.prompt, token_ids, sampled)
            if rest is not None:
                self.same = place, rest
                break
        return self


class SessionTree:
    """One session. Each ``ask`` is followed by ``answered`` or ``dropped``; asks may overlap."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._roots: dict[str, _Node] = {}  # by tools and options
        self._answers: set[str] = set()  # the keys of all answers
        self.branches: list[Branch] = []
        self.prefix_breaks: Counter[str] = Counter()

    def ask(
        self, messages: Sequence[Message], tools: Tools | None = None, options: Mapping[str, Any] | None = None
    ) -> Ask:
        """Finds the branch that a chat continues, and renders its new messages.

        Raises InvalidValue if the template refuses the chat; then nothing has changed.
        """
        return self.begin(self.plan(messages, tools, options).rendered())

    def plan(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        options: Mapping[str, Any] | None = None,
        prompt: Rendered | None = None,
    ) -> "Plan":
        """Finds the answer that a chat continues. ``prompt`` is the whole chat, if it was rendered before."""
        options = options or {}
        context, keys = context_key(tools, options), tuple(map(key_of, messages))
        root = self._roots.get(context, _Node())
        parent, count, reason = self._find(root, messages, keys)
        sampled = None if parent.place is None else self._answer(parent.place)
        about = (messages, tools, options, context, keys, root, parent, count, sampled, self._tips())
        return Plan(self._renderer, *about, reason, prompt)

    def begin(self, plan: "Plan") -> Ask:
        """Returns the ask of a plan that was rendered. It may have several, each of which begins a branch."""
        if plan.suffix is not None:
            return self._begin(plan.suffix, plan.parent.place, plan.reason, plan.parent, plan.keys[plan.count :])
        assert plan.prompt is not None, "rendered"
        root = self._roots.setdefault(plan.context, plan.root)
        origin, rest = plan.same or self._longest(plan.prompt)[:2]
        return self._begin(rest, origin, plan.reason, root, plan.keys)

    def ask_tokens(self, token_ids: Sequence[int]) -> Ask:
        """Finds the branch that a prompt of token ids continues: the one with the longest common beginning."""
        origin, rest, cuts = self._longest(Rendered("", tuple(token_ids)))
        return self._begin(rest, origin, "tokens" if cuts else NEW if origin is None else BRANCH, None, ())

    def restored(self, token_ids: Sequence[int], first: int) -> None:
        """Notes a branch that was sampled earlier, whose last answer begins at token ``first``."""
        self.branches.append(Branch(list(token_ids), [(first, len(token_ids))]))

    def ask_restored(
        self, messages: Sequence[Message], tools: Tools | None, options: Mapping[str, Any], *, is_thinking: bool
    ) -> Ask:
        """Takes the last answer, to ``messages`` or a prompt, off a restored branch. Returns the ask of that answer."""
        root = self._roots.setdefault(context_key(tools, options), _Node()) if messages else None
        (branch,) = self.branches
        first, end = branch.turns.pop()
        del branch.token_ids[first:end]
        branch.is_open = False
        return Ask(0, (), is_thinking=is_thinking, _parent=root, _keys=tuple(map(key_of, messages)))

    def answered(self, ask: Ask, sampled: Sequence[int], message: Message | None = None) -> None:
        """Notes the tokens of a turn that has ended, and the message that the client was told."""
        branch = self.branches[ask.branch]
        branch.token_ids += ask.inputs
        first = len(branch.token_ids)
        branch.token_ids += sampled
        branch.turns.append((first, len(branch.token_ids)))
        branch.is_open = True
        if message is None or ask._parent is None:
            return
        node, key = ask._parent, key_of(message)
        for each in ask._keys:
            plain = [child for child in node.children.setdefault(each, []) if child.place is None]
            if not plain:
                plain = [_Node()]
                node.children[each] += plain
            node = plain[0]
        node.children.setdefault(key, []).append(_Node(BranchPlace(ask.branch, len(branch.token_ids))))
        self._answers.add(key)

    def dropped(self, ask: Ask, *, is_known: bool = True) -> None:
        """Notes that a turn has failed. If the service knows of it (``is_known``), its branch cannot go on."""
        self.branches[ask.branch].is_open = not is_known

    def _find(self, root: _Node, messages: Sequence[Message], keys: Sequence[str]) -> tuple[_Node, int, str]:
        """Returns this session's last answer among the messages, their number up to it, and why a branch begins."""
        found, count, level = root, 0, [root]
        for number, key in enumerate(keys, start=1):
            below = [child for node in level for child in node.children.get(key, ())]
            answers = [child for child in below if child.place is not None]
            if answers:
                found, count = next((each for each in answers if self._is_tip(each.place)), answers[-1]), number
            if not below:
                break
            level = below
        rest = messages[count:]
        if any(key in self._answers for key in keys[count:]) or self._replaced(level, rest, number - 1 - count):
            return found, count, "history" if root.children or count else "tools"
        return found, count, BRANCH if count else NEW

    @staticmethod
    def _replaced(level: Sequence[_Node], rest: Sequence[Message], number: int) -> bool:
        answers = any(child.place for node in level for children in node.children.values() for child in children)
        return answers and rest[number]["role"] == "assistant"

    def _is_tip(self, place: BranchPlace | None) -> bool:
        if place is None:
            return False
        branch = self.branches[place.branch]
        return branch.is_open and len(branch.token_ids) == place.tokens

    def _answer(self, place: BranchPlace) -> list[int]:
        branch = self.branches[place.branch]
        first = next(first for first, end in branch.turns if end == place.tokens)
        return branch.token_ids[first : place.tokens]

    def _tips(self) -> list[tuple[BranchPlace, list[int], list[int]]]:
        found = []
        for number, branch in reversed(list(enumerate(self.branches))[-_TEXTS_MAX:]):
            place = BranchPlace(number, len(branch.token_ids))
            if branch.turns and self._is_tip(place):
                found.append((place, [*branch.token_ids], self._answer(place)))
        return found

    def _longest(self, rendered: Rendered) -> tuple[BranchPlace | None, Rendered, bool]:
        """Returns the place from which most tokens of a prompt can be kept, the rest, and whether an answer differs."""
        token_ids = np.asarray(rendered.token_ids, np.int32)
        best, kept, cuts = None, (0, False), False
        for number, branch in enumerate(self.branches):
            common = branch.common(token_ids)
            cuts = cuts or any(first < common < end for first, end in branch.turns)
            end = max((end for _, end in branch.turns if end <= common and end < len(token_ids)), default=0)
            place = BranchPlace(number, end)
            if end and (end, self._is_tip(place)) > kept:
                best, kept = place, (end, self._is_tip(place))
        return best, Rendered(rendered.text, rendered.token_ids[kept[0] :]), cuts

    def _begin(
        self, rendered: Rendered, origin: BranchPlace | None, reason: str, parent: _Node | None, keys: tuple[str, ...]
    ) -> Ask:
        inputs, thinks = rendered.token_ids, rendered.is_thinking
        if origin is not None and self._is_tip(origin):
            self.branches[origin.branch].is_open = False
            return Ask(origin.branch, inputs, is_thinking=thinks, _parent=parent, _keys=keys)
        number = len(self.branches)
        reason = reason if number else ""
        if reason in BREAKS:
            self.prefix_breaks[reason] += 1
        branch = Branch() if origin is None else self.branches[origin.branch].until(origin.tokens)
        branch.is_open = False
        self.branches.append(branch)
        return Ask(number, inputs, True, origin, reason, thinks, parent, keys)
