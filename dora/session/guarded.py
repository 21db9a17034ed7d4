"""The credentials that workers and pools need."""

from dora.errors import InvalidValue
from dora.tls import Tls


def check_token(token: str, tls: Tls | None) -> None:
    """Raises InvalidValue for a worker or pool without a token and without a certificate."""
    if not token and (tls is None or not tls.cert):
        raise InvalidValue("DORA_TOKEN", "", "the service's worker token, in the environment, or a certificate (--tls)")
