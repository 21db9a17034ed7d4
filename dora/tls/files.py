"""The files of a process's certificate, its key and the authorities that it trusts, and their check at a start."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from dora.errors import InvalidValue
from dora.tls.handshake import refusal

if TYPE_CHECKING:  # most processes have no certificate, and start sooner without it
    from cryptography import x509

CERT, KEY, CA = "cert.pem", "key.pem", "ca.pem"  # in a folder
FOLDER_VARIABLE: Final = "DORA_TLS"
VARIABLES: Final = {
    "cert": "DORA_TLS_CERT",
    "key": "DORA_TLS_KEY",
    "ca": "DORA_TLS_CA",
    "name": "DORA_TLS_NAME",
    "domain": "DORA_TLS_DOMAIN",
}
PATHS: Final = ("cert", "key", "ca")
FILE_MAX_BYTES: Final = 1 << 20
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Material:
    """The contents of the files. ``cert`` and ``key`` are empty for a client without a certificate."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files. ``ca`` has the authorities whose certificates are accepted. ``cert``, with those between it
    and the authority, and ``key`` are this process's own; both are empty for a client without a certificate.

    The service's certificate must have ``name``, if that is not the host in its address. Only roles in the SPIFFE trust
    domain, or DNS suffix, ``domain`` count, or any that the authorities vouch for if it is empty.
    """

    ca: str
    cert: str = ""
    key: str = ""
    name: str = ""
    domain: str = ""

    @classmethod
    def of_folder(cls, folder: str | Path) -> Self:
        """Returns the files of a folder: ca.pem, and cert.pem and key.pem if it has one of them."""
        found = Path(folder).expanduser()
        has_own = (found / CERT).exists() or (found / KEY).exists()
        own = (str(found / CERT), str(found / KEY)) if has_own else ("", "")
        return cls(str(found / CA), *own)

    @classmethod
    def from_files(cls, folder: str = "", **single: str) -> Self | None:
        """Returns the files that options or variables name: a folder, and single fields, which override the folder's.
        Returns None if no file is named.

        Raises InvalidValue for a certificate without its key, and for files without an authority.
        """
        stated = {field: value for field, value in single.items() if value}
        if not folder and not stated.keys() & set(PATHS):
            return None
        base = cls.of_folder(folder) if folder else cls("")
        found = replace(base, **stated)
        if not found.ca:
            raise InvalidValue("tls.ca", "", "the file of the authority whose certificates are accepted (--tls-ca)")
        if bool(found.cert) != bool(found.key):
            lacking = "tls.key" if found.cert else "tls.cert"
            raise InvalidValue(lacking, "", "a file: a certificate and its key go together (--tls-cert, --tls-key)")
        return found

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Self | None:
        """Returns the files that DORA_TLS (a folder), DORA_TLS_CERT, DORA_TLS_KEY and DORA_TLS_CA name, or None."""
        source = os.environ if variables is None else variables
        single = {part: source.get(name, "") for part, name in VARIABLES.items()}
        return cls.from_files(source.get(FOLDER_VARIABLE, ""), **single)

    def environment(self) -> dict[str, str]:
        """Returns the variables by which a child process has these files."""
        stated = {VARIABLES[field]: getattr(self, field) for field in VARIABLES}
        paths = {VARIABLES[field] for field in PATHS}
        return {name: os.path.abspath(value) if name in paths else value for name, value in stated.items() if value}

    def signature(self) -> Signature:
        """Returns a value that changes when one of the files is replaced. Raises OSError."""
        found = [os.stat(path) for path in (self.cert, self.key, self.ca) if path]
        return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)

    def read(self) -> Material:
        """Returns the files' contents. Raises InvalidValue for one that cannot be read, or a key that others can."""
        cert = _content("tls.cert", self.cert) if self.cert else b""
        key = _content("tls.key", self.key, secret=True) if self.key else b""
        return Material(cert, key, _content("tls.ca", self.ca))

    def check(self, now: datetime | None = None, *, serves: bool = False) -> Material:
        """Returns the contents, once they belong together: the key fits the certificate, an authority of ``ca`` has
        issued it, all are valid at ``now``, and the certificate may be used as a client's, and a server's if it
        ``serves``. Raises InvalidValue.
        """
        found, now = self.read(), now or datetime.now(UTC)
        authorities = _certificates("tls.ca", self.ca, found.ca)
        for authority in authorities:
            _check_dates("tls.ca", self.ca, authority, now, may_be_old=len(authorities) > 1)
        if serves and not found.cert:
            raise InvalidValue("tls.cert", "", "the certificate of this machine, with its key in tls.key")
        if found.cert:
            certificate = _certificates("tls.cert", self.cert, found.cert)[0]
            _check_dates("tls.cert", self.cert, certificate, now)
            _check_key(self, found, certificate)
            _check_issued(self, serves)
        return found


def check_names(tls: Tls, found: Material, host: str) -> None:
    """Raises InvalidValue unless the certificate names this host name or address, which clients will connect to."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(found.cert)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    hosts = [name.lower() for name in names.get_values_for_type(x509.DNSName)]
    hosts += [str(each) for each in names.get_values_for_type(x509.IPAddress)]
    parents = host.lower().partition(".")[2]
    if host.lower() not in hosts and not (parents and f"*.{parents}" in hosts):
        why = f"names {', '.join(hosts) or 'no host'}, and not {host}, where the service listens"
        raise InvalidValue("tls.cert", tls.cert, f"a certificate that names {host}", why=why)


def _content(field: str, path: str, *, secret: bool = False) -> bytes:
    try:
        with open(path, "rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if secret and mode & 0o007:
                raise InvalidValue(field, f"{path} (mode {mode:04o})", "a file that other users cannot read")
            return opened.read(FILE_MAX_BYTES)
    except OSError as error:
        raise InvalidValue(field, f"{path} ({error.strerror})", "a PEM file that can be read") from error


def _certificates(field: str, path: str, pem: bytes) -> "list[x509.Certificate]":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise InvalidValue(field, path, "a PEM file with a certificate", why="holds no certificate") from error


def _check_dates(
    field: str, path: str, certificate: "x509.Certificate", now: datetime, *, may_be_old: bool = False
) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        why = f"is valid from {begins:%Y-%m-%d %H:%M:%S} UTC on, and this machine's clock says {now:%Y-%m-%d %H:%M:%S}"
        raise InvalidValue(field, path, "a certificate that is valid now, on a machine with the right time", why=why)
    if now > ends and not may_be_old:
        why = f"expired at {ends:%Y-%m-%d %H:%M:%S} UTC"
        raise InvalidValue(field, path, "a certificate that is valid now: make or fetch a new one", why=why)


def _check_key(tls: Tls, found: Material, certificate: "x509.Certificate") -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        key = load_pem_private_key(found.key, None)
    except (ValueError, TypeError) as error:
        why = "holds no private key that can be read" if isinstance(error, ValueError) else "is under a pass phrase"
        raise InvalidValue(
            "tls.key", tls.key, "a PEM file with a private key without a pass phrase", why=why
        ) from error
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise InvalidValue("tls.key", tls.key, "the key of that certificate", why=f"does not fit {tls.cert}")


def _check_issued(tls: Tls, serves: bool) -> None:
    """Connects both ends within this process, as OpenSSL alone decides what it accepts."""
    for as_server in (False, True) if serves else (False,):
        reason = refusal(tls.ca, tls.cert, tls.key, as_server=as_server)
        if reason:
            kind = "a server's" if as_server else "a client's"
            allowed = f"a certificate that {tls.ca} has issued, for use as {kind}"
            raise InvalidValue("tls.cert", tls.cert, allowed, why=f"is not accepted ({reason})")
