"""Chats over sessions whose history is never tokenised again. Pure: no I/O, no clock.

A session is a tree of branches. A branch is what a service samples as one session: a list of token ids, of which some
were given and the rest sampled. A client of a chat API sends the whole history with each request. These modules turn
such a request into the *new* tokens of one branch:

```python
renderer = ChatRenderer(tokenizer, end_token_ids)  # tokenizer: dora.prompts.ChatTokenizer
tree = SessionTree(renderer)

ask = tree.ask(messages, tools, options)  # OpenAI's messages and tools; options: variables of the template
# ask.branch continues with ask.given. If ask.begins, the branch is new, with the first ask.origin.tokens tokens of the
# branch ask.origin.branch (None: with none).
sampled = await session_of(ask).ask(ask.given)  # the caller's
reply = ReplyParser(tool_format, is_thinking=ask.is_thinking).parse(text_of(sampled))
tree.answered(ask, sampled, reply.message())  # or tree.dropped(ask) if the turn has failed

ask = tree.ask_tokens(token_ids)  # the same for a client that sends token ids: the whole prompt
```

| module | contents |
|---|---|
| ``message`` | ``checked_chat``, ``checked_tools``, ``key_of`` (equality of messages as clients repeat them) |
| ``rendering`` | ``ChatRenderer``: a whole prompt, or the suffix that the template writes for new messages |
| ``tree`` | ``SessionTree``, ``Ask``, ``BREAKS``: the reasons for which a history could not be continued |
| ``tool_calls`` | ``ToolFormat``, ``FORMATS``, ``format_of(chat_template)``: calls in a reply's text |
| ``reply`` | ``Reply``, ``ReplyParser``: a whole reply, or its text piece by piece |
| ``text`` | ``TextStream``: token ids to text, piece by piece |
"""
