"""Signed-in browsers: who they are at the service, by a cookie that scripts cannot read."""

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dora.client import Operator
from dora.errors import MISSING, DoraError, LimitExceeded
from dora.rpc.errors import PermissionDenied, Unauthenticated
from dora.tls import Tls

BROWSERS: Final = 1024  # signed in; the one unused for longest is forgotten first
IDLE_S: Final = 12 * 3600.0
CHECK_S: Final = 60.0  # how long a token's rights are believed
CONNECTIONS: Final = 32  # to the service, one for each token
SIGNING_IN: Final = 16  # at once
CALL_S: Final = 10.0


@dataclass(slots=True)
class Browser:
    """A signed-in browser. If ``may_act`` is false, its token may only look at the state of the service."""

    csrf: str = field(repr=False)
    token: str = field(repr=False)
    may_act: bool
    used_s: float
    checked_s: float


class Browsers:
    def __init__(self, service: str, tls: Tls | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._tls = tls
        self._clock = clock
        self._known: OrderedDict[str, Browser] = OrderedDict()
        self._operators: OrderedDict[str, Operator] = OrderedDict()
        self._signing_in = 0

    async def sign_in(self, token: str) -> str:
        """Returns the cookie of a new browser. Raises Unauthenticated, PermissionDenied, ServiceUnavailable,
        InvalidValue for a token that is not printable ASCII, LimitExceeded.
        """
        if not token:  # a front's own certificate would answer for it
            raise Unauthenticated("token", MISSING, "the service's operator or metrics token, or its owner's")
        if self._signing_in >= SIGNING_IN:
            raise LimitExceeded("sign-ins", self._signing_in, f"at most {SIGNING_IN} at once: try again")
        self._signing_in += 1
        try:
            async with self._connected(token) as operator:
                may_act = await _may_act(operator)
        finally:
            self._signing_in -= 1
        cookie, now_s = secrets.token_urlsafe(32), self._clock()
        self._known[cookie] = Browser(secrets.token_urlsafe(32), token, may_act, now_s, now_s)
        while len(self._known) > BROWSERS:
            self._known.popitem(last=False)
        return cookie

    def _connected(self, token: str) -> Operator:
        return Operator(self._service, token, tls=self._tls, timeout_s=CALL_S)

    async def find(self, cookie: str) -> Browser | None:
        """Returns a signed-in browser. Returns None for an unknown cookie, for one unused for long, and if the service
        has begun to refuse its token. While the service does not answer, earlier rights hold.
        """
        browser, now_s = self._known.get(cookie), self._clock()
        if browser is None:
            return None
        if now_s - browser.used_s > IDLE_S:
            self.forget(cookie)
            return None
        browser.used_s = now_s
        self._known.move_to_end(cookie)
        if now_s - browser.checked_s > CHECK_S:
            browser.checked_s = now_s
            try:
                browser.may_act = await _may_act(self.operator(browser))
            except (Unauthenticated, PermissionDenied):
                self.forget(cookie)
                return None
            except DoraError:
                pass
        return browser

    def forget(self, cookie: str) -> None:
        self._known.pop(cookie, None)

    def operator(self, browser: Browser) -> Operator:
        """Returns a client with the browser's own token."""
        found = self._operators.pop(browser.token, None) or self._connected(browser.token)
        self._operators[browser.token] = found
        return found

    async def trim(self) -> None:
        """Closes the connections of tokens that are unused for longest."""
        while len(self._operators) > CONNECTIONS:
            _, operator = self._operators.popitem(last=False)
            await operator.close()

    async def close(self) -> None:
        while self._operators:
            _, operator = self._operators.popitem()
            await operator.close()


def is_same(shown: str, own: str) -> bool:
    return hmac.compare_digest(shown.encode(), own.encode())


async def _may_act(operator: Operator) -> bool:
    """Raises Unauthenticated or PermissionDenied if the token may not even look."""
    try:
        await operator.trajectories(limit=1)
    except PermissionDenied:
        await operator.status()
        return False
    return True
