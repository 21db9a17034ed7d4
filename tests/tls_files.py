"""Certificates for tests: a cluster's folder, and one certificate of any kind."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

from dora.rpc.roles import Role
from dora.tls import Tls
from dora.tls.authority import AUTHORITY, Authority, make_cluster, write_private
from dora.tls.files import CA, CERT, KEY


def cluster(folder: Path) -> Path:
    """The folder of an authority with certificates of the service, one host and all roles, for this host."""
    make_cluster(folder, ["127.0.0.1"], [str(role) for role in Role], days=30, authority_days=365)
    return folder


def tls(folder: Path, role: str) -> Tls:
    return Tls.of_folder(folder / role)


def another(
    folder: Path,
    role: str,
    into: Path,
    *,
    ends_s: float = 3600.0,
    now: datetime | None = None,
    serves: bool | None = None,
) -> Tls:
    """One more certificate of the authority in ``folder``, for a role, that is valid for so long from ``now`` on."""
    authority = Authority.read(folder / AUTHORITY)
    hosts = ("127.0.0.1", "localhost")
    cert, key = authority.issue(role, "", hosts, now or datetime.now(UTC), ends_s / 86400, serves=serves)
    for name, content in ((CERT, cert), (KEY, key), (CA, authority.trusted)):
        write_private(into / name, content)
    return Tls.of_folder(into)


def shows(own: Tls) -> ssl.SSLContext:
    """A client's context with these files, whatever they are worth."""
    context = ssl.create_default_context(cafile=own.ca)
    context.check_hostname = False
    if own.cert:
        context.load_cert_chain(own.cert, own.key)
    return context
