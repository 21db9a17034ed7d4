"""Ids and keys of sessions: they follow from the service's state, so every front knows them and nobody guesses them."""

import base64
import hmac
import re
from typing import Final

KEY: Final = "dora-"  # begins each session's key
_OPENED: Final = re.compile(r"(g\d+\.\d+(?:~\d+)?)(?:-[A-Za-z0-9_-]*)?")  # the service's id of a session, and a tag


def opened_id(service_id: str, capability: bytes) -> str:
    """Returns the id under which a session of an opened group is reached."""
    return f"{service_id}-{_text(hmac.digest(capability, b'id', 'sha256')[:12])}"


def service_id_of(session_id: str) -> str:
    """Returns the service's id in that of an opened session; empty for one that its first call has named."""
    found = _OPENED.fullmatch(session_id)
    return found[1] if found else ""


def key_of(session_id: str, capability: bytes) -> str:
    return f"{KEY}{_text(session_id.encode())}.{_text(hmac.digest(capability, session_id.encode(), 'sha256')[:24])}"


def session_of(key: str) -> str:
    """Returns the id of the session whose key this may be, or an empty text."""
    if not key.startswith(KEY) or not key.isascii():
        return ""
    try:
        return base64.b64decode(key[len(KEY) :].partition(".")[0] + "==", altchars=b"-_").decode()
    except ValueError:
        return ""


def is_same(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), known.encode())


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
