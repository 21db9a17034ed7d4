"""The credentials that workers and pools need."""

from dora.errors import InvalidValue
from dora.tls import Tls


def check_credentials(token: str, tls: Tls | None) -> None:
    """Raises InvalidValue without token and certificate, and for TLS files that it cannot listen with."""
    if tls is not None:
        tls.check(serves=True)
    if not token and tls is None:
        raise InvalidValue("DORA_TOKEN", "", "the service's worker token, in the environment, or a certificate (--tls)")
