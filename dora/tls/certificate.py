"""What a certificate says of its holder: roles and a name, by its SPIFFE URIs and DNS names.

    URI   spiffe://TRUST-DOMAIN/dora/ROLE[/NAME]
    DNS   [NAME.]ROLE.dora[.DOMAIN]

The authority vouches for both. A common name is not read. A certificate without such names has no role: it opens
connections, and its holder needs a token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:  # most processes have no certificate, and start sooner without it
    from cryptography import x509

MARK: Final = "dora"  # the path segment, or the DNS label, beside which the role is
NAME_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a certificate. ``roles`` are as written there, known or not."""

    roles: frozenset[str]
    name: str  # the first one that goes with a role; empty: none does
    begins: datetime
    ends: datetime

    def is_valid(self, now: datetime) -> bool:
        return self.begins <= now <= self.ends


@lru_cache(maxsize=4096)
def holder_of(pem: bytes, domain: str = "") -> Holder:
    """Returns the holder of the first certificate in ``pem``. Only names in the trust domain, or DNS suffix, ``domain``
    count, or any that the authority vouches for if it is empty. Raises ValueError for what is no certificate.
    """
    from cryptography import x509

    return _holder(x509.load_pem_x509_certificate(pem), domain)


@lru_cache(maxsize=4096)
def holder_of_der(der: bytes, domain: str = "") -> Holder:
    from cryptography import x509

    return _holder(x509.load_der_x509_certificate(der), domain)


def _holder(certificate: "x509.Certificate", domain: str) -> Holder:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    uris: Iterable[str] = names.get_values_for_type(x509.UniformResourceIdentifier)
    labels: Iterable[str] = names.get_values_for_type(x509.DNSName)
    found = [each for uri in uris if (each := _of_uri(uri, domain)) is not None]
    found += [each for name in labels if (each := _of_dns(name, domain)) is not None]
    return Holder(
        frozenset(role for role, _ in found),
        next((name for _, name in found if name), "")[:NAME_MAX],
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
    )


def _of_uri(uri: str, domain: str) -> tuple[str, str] | None:
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    mark, _, rest = parts.path.removeprefix("/").partition("/")
    role, _, name = rest.partition("/")
    is_ours = parts.scheme == "spiffe" and not parts.query and not parts.fragment and mark == MARK and bool(role)
    if not is_ours or (domain and parts.netloc.lower() != domain.lower()):
        return None
    return role, unquote(name)


def _of_dns(name: str, domain: str) -> tuple[str, str] | None:
    labels = name.lower().split(".")
    if MARK not in labels or "*" in name:
        return None
    at = labels.index(MARK)
    if at == 0 or (domain and ".".join(labels[at + 1 :]) != domain.lower()):
        return None
    return labels[at - 1], ".".join(labels[: at - 1])
