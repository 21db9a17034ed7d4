"""Requests that a web page makes. A page of another site may change nothing, and reads nothing by a name that its owner
gives to this host.
"""

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from dora.errors import InvalidValue
from dora.rpc.errors import PermissionDenied

FORM: Final = "application/x-www-form-urlencoded"
_SIMPLE: Final = (FORM, "multipart/form-data", "text/plain")  # a page sends these elsewhere without asking


def check_site(request: web.Request, *, form: bool = False) -> None:
    """Raises PermissionDenied for a request to change something that comes from a page of another site, InvalidValue
    for a body of a type that any page may send. ``form`` says that the route takes a form.

    Browsers name the site over connections that they trust, and the origin over all.
    """
    if request.method in ("GET", "HEAD", "OPTIONS"):
        return
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None and site not in ("same-origin", "none"):
        raise PermissionDenied("request", f"({site})", "one of this front's own pages, or of no page")
    if site is None and origin is not None and _netloc(origin) != request.headers.get("Host", ""):
        raise PermissionDenied("Origin", origin[:80], "this front's own, or left out")
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind in _SIMPLE and not (form and kind == FORM) and request.can_read_body:
        raise InvalidValue("Content-Type", kind, FORM if form else "application/json")


def check_host(request: web.Request) -> None:
    """Raises PermissionDenied for a name that is not this host's, such as a page's that has a loopback address."""
    host = request.headers.get("Host", "localhost")
    name = (urlsplit(f"//{host}").hostname or "") if _netloc(f"http://{host}") else ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if "." in name.removesuffix(".localhost") or not name:
            allowed = "an address, localhost or a name without a dot, as this front takes any key"
            raise PermissionDenied("Host", host[:80], allowed) from None


def _netloc(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""
