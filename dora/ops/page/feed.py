"""Follows a service's status into the history, and publishes each update."""

import asyncio
import json
import logging
import time
from typing import Any, Final

from dora.client import Operator
from dora.errors import DoraError
from dora.ops.page.history import History
from dora.ops.page.viewers import Viewers

log = logging.getLogger("dora.page")

PERIOD_MS: Final = 1000
RETRY_S: Final = 1.0
RETRY_MOST_S: Final = 15.0
WHOLE_S: Final = 2.0  # how old a copy of the history for new browsers may be


class StatusFeed:
    """Follows the service's status. ``trouble`` says why the service does not answer, and is empty while it does."""

    def __init__(self, operator: Operator) -> None:
        self.history = History()
        self.viewers = Viewers()
        self.trouble = ""
        self._operator = operator
        self._whole = (float("-inf"), b"")

    async def run(self) -> None:
        """Follows until it is cancelled, and begins again after a failure."""
        retry_s = RETRY_S
        while True:
            try:
                async for status in self._operator.watch(PERIOD_MS, only_new=True):
                    self.trouble, retry_s = "", RETRY_S
                    update = self.history.add(status, time.time())
                    self.viewers.publish(self.history.seq, event(update))
                trouble = "the service has ended"
            except DoraError as error:
                trouble = str(error)
            if trouble != self.trouble:
                log.warning("the page has no status: %s", trouble)
            self.trouble = trouble
            self.history.seq += 1
            self.viewers.publish(self.history.seq, event({"seq": self.history.seq, "trouble": trouble}))
            await asyncio.sleep(retry_s)
            retry_s = min(RETRY_MOST_S, 2 * retry_s)

    def whole(self) -> bytes:
        """Returns the history as JSON, at most WHOLE_S old."""
        now_s = time.monotonic()
        if now_s - self._whole[0] > WHOLE_S:
            self._whole = now_s, encoded({**self.history.whole(), "trouble": self.trouble})
        return self._whole[1]


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=list).encode()


def event(value: Any) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"
