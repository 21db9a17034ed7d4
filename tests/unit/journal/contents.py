"""What a start finds in records that are no log on disk."""

from collections.abc import Sequence

from dora.journal.content import Content, LiveGroup, Requests
from dora.journal.durable import Durable
from dora.journal.records import LogRecord, Tokens


def durable_of(log: Sequence[LogRecord]) -> Durable:
    """The state that the records fold to, from its own checkpoint."""
    durable = Durable()
    for record in log:
        durable.apply(record)
    return Durable.from_checkpoint(durable.checkpoint())


def content_of(log: Sequence[LogRecord], durable: Durable) -> Content:
    content = Content(durable)
    content.add(log)
    return content


def requests_of(group: LiveGroup, tokens: Sequence[Tokens]) -> Requests:
    """The requests of a single group."""
    log = [group.admitted(), *tokens]
    content = content_of(log, durable_of(log[:1]))
    return content.requests(content.groups())
