"""The operator's web page of a front.

    service ── WatchStatus ──▶ feed ──▶ history ──▶ viewers ──▶ server-sent events ──▶ browsers
                                                    browsers ── actions ──▶ service, with the browser's own token

Everything but the sign-in page needs a token of the service, which a browser gives once.
"""

from dora.ops.page.routes import mounted as mounted
