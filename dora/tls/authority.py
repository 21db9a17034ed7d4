"""A small private authority for one cluster: its own certificate, and one for each role and machine.

DIR/authority/   ca.pem, ca.key   keep the key off the cluster
DIR/service/     cert.pem, key.pem, ca.pem: a folder for ``--tls``
DIR/host-NAME/   the same for each machine
DIR/front-NAME/  the same for a front there
DIR/trainer/     and so on for each role
"""

import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dora.errors import InvalidValue
from dora.tls.certificate import MARK
from dora.tls.files import CA, CERT, KEY, LOOPBACK

AUTHORITY: Final = "authority"
AUTHORITY_KEY: Final = "ca.key"
SERVES: Final = frozenset({"service", "host", "worker", "front"})  # roles whose processes listen
COMMON_NAME: Final = "DORA cluster"  # of an authority that is made here: its beginning
SKEW: Final = timedelta(minutes=5)  # that a machine's clock may be behind
NAME_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority that issues certificates. ``trusted`` is the PEM of all whose certificates the cluster accepts."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    trusted: bytes

    @classmethod
    def made(cls, days: float, now: datetime, trusted: bytes = b"") -> "Authority":
        """Makes a new one. ``trusted`` has earlier ones, which stay accepted."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{COMMON_NAME} {now:%Y-%m-%d %H:%M:%S}")])
        certificate = (
            _builder(name, name, key.public_key(), now, now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key, certificate.public_bytes(Encoding.PEM) + trusted)

    @classmethod
    def read(cls, folder: Path) -> "Authority":
        """Reads the authority of a folder. Raises InvalidValue if it has none that can be read."""
        try:
            trusted = (folder / CA).read_bytes()
            key = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(trusted)
        except (OSError, ValueError, TypeError) as error:
            raise InvalidValue("DIR", str(folder), f"a folder with {CA} and {AUTHORITY_KEY} ({error})") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise InvalidValue("DIR", str(folder), f"a folder in which {AUTHORITY_KEY} is the key of {CA}")
        return cls(certificate, key, trusted)

    def write(self, folder: Path) -> None:
        """Writes the authority into a folder. Raises OSError."""
        write_private(folder / AUTHORITY_KEY, _pem(self.key))
        write_private(folder / CA, self.trusted)

    def issue(
        self, role: str, name: str, hosts: Iterable[str], now: datetime, days: float, *, serves: bool | None = None
    ) -> tuple[bytes, bytes]:
        """Returns a certificate for a role and its key, as PEM. Its process listens at the names and addresses
        ``hosts``. ``serves`` says whether it listens at all; if None, as the role does. It ends with the authority's
        own at the latest.
        """
        serves = role in SERVES if serves is None else serves
        key = ec.generate_private_key(ec.SECP256R1())
        uri = f"spiffe://{MARK}/{MARK}/{role}" + (f"/{quote(name, safe='')}" if name else "")
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
        names += [_general_name(each) for each in dict.fromkeys(hosts)]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH] + [ExtendedKeyUsageOID.SERVER_AUTH] * serves
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{role} {name}".strip()[:NAME_MAX])])
        ends = min(now + timedelta(days=days), self.certificate.not_valid_after_utc)
        certificate = (
            _builder(subject, self.certificate.subject, key.public_key(), now, ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(Encoding.PEM), _pem(key)


def is_of_cluster(trusted: bytes) -> bool:
    """Returns whether all authorities of this PEM were made here, for one cluster alone."""
    names = (each.subject.rfc4514_string() for each in x509.load_pem_x509_certificates(trusted))
    return all(name.startswith(f"CN={COMMON_NAME} ") for name in names)


def make_cluster(
    folder: Path,
    hosts: Sequence[str],
    roles: Sequence[str],
    *,
    days: float,
    authority_days: float,
    new_authority: bool = False,
    now: datetime | None = None,
) -> list[Path]:
    """Makes or renews a cluster's certificates; returns the written folders. The authority stays that of the folder,
    except if a ``new_authority`` is wanted: then certificates of both are accepted.

    Each file is replaced at once: services that use the folders read them again. Raises InvalidValue for a host that is
    no name or address, or for an authority that cannot be read; OSError.
    """
    now = now or datetime.now(UTC)
    for each in hosts:
        _general_name(each)
    place = folder / AUTHORITY
    has_one = (place / CA).exists()
    authority = Authority.read(place) if has_one else Authority.made(authority_days, now)
    if has_one and new_authority:
        authority = Authority.made(authority_days, now, authority.trusted)
    if not has_one or new_authority:
        authority.write(place)
    entries = [(folder / "service", "service", "", (*hosts, *LOOPBACK))]
    for role in ("host", "front"):
        entries += [(folder / f"{role}-{each.replace(':', '_')}", role, each, (each, *LOOPBACK)) for each in hosts]
    entries += [(folder / each, each, "", ()) for each in roles]
    if new_authority:  # all must accept the new authority before the first certificate of it is shown
        for place, *_ in entries:
            write_private(place / CA, authority.trusted)
    for place, role, name, names in entries:
        cert, key = authority.issue(role, name, names, now, days)
        write_private(place / CA, authority.trusted)
        write_private(place / KEY, key)
        write_private(place / CERT, cert)
    return [folder / AUTHORITY, *(place for place, *_ in entries)]


def write_private(file: Path, content: bytes) -> None:
    """Replaces a file, of mode 0600, at once. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(new, file)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not host or not host.isascii() or any(not (each.isalnum() or each in ".-") for each in host):
        raise InvalidValue("--hosts", host, "host names and addresses, with commas between them")
    return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - SKEW)
        .not_valid_after(ends)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
