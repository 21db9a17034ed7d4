"""What certificates say: roles by SPIFFE URIs and DNS names, and nothing else; and who may call what with one."""

import argparse
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from dora.config import validated
from dora.errors import InvalidValue
from dora.orchestrator.guard import check_tls
from dora.rpc.access import caller_by, check_certificate
from dora.rpc.errors import PermissionDenied, Unauthenticated
from dora.rpc.roles import Role
from dora.session.guarded import check_credentials
from dora.tls import Tls, options
from dora.tls.certificate import Holder, holder_of
from dora.tls.files import VARIABLES
from dora.tls.watched import Watched
from tests.refusals import refused
from tests.tls_files import another, cluster, tls

NOW = datetime.now(UTC)


def certified(uris: tuple[str, ...] = (), names: tuple[str, ...] = (), domain: str = "") -> Holder:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "operator.dora")])
    found = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, names)]
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), 7, NOW, NOW + timedelta(days=1))
    if found:
        builder = builder.add_extension(x509.SubjectAlternativeName(found), critical=False)
    return holder_of(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM), domain)


@pytest.mark.parametrize(
    ("uris", "names", "roles", "name"),
    [
        (("spiffe://corp/dora/trainer",), (), {"trainer"}, ""),
        (("spiffe://corp/dora/trainer/alice%20b",), (), {"trainer"}, "alice b"),
        (("spiffe://corp/dora/trainer", "spiffe://corp/dora/operator/bob"), (), {"trainer", "operator"}, "bob"),
        ((), ("operator.dora",), {"operator"}, ""),
        ((), ("bob.Operator.dora.corp.example",), {"operator"}, "bob"),
        ((), (), set(), ""),
        ((), ("dora.operator", "operator", "operator-dora.corp", "*.operator.dora"), set(), ""),
        (("https://corp/dora/trainer", "spiffe://corp/trainer", "spiffe://corp/dora/", "spiffe:///"), (), set(), ""),
        (("spiffe://corp/dora/trainer?x=1", "spiffe://corp/dora/trainer#x", "spiffe://[/dora/trainer"), (), set(), ""),
        (("spiffe://corp/other/dora/trainer", "urn:dora:trainer"), (), set(), ""),
    ],
)
def test_roles_and_names(uris: tuple[str, ...], names: tuple[str, ...], roles: set[str], name: str) -> None:
    holder = certified(uris, names)
    assert (holder.roles, holder.name) == (roles, name)


def test_only_names_of_the_domain_count() -> None:
    uris, names = ("spiffe://corp/dora/trainer", "spiffe://evil/dora/owner"), ("operator.dora.corp", "host.dora.evil")
    assert certified(uris, names, "corp").roles == {"trainer", "operator"}
    assert certified(uris, names, "elsewhere").roles == set()


def test_a_certificate_permits_what_its_roles_may_call_while_it_is_valid() -> None:
    holder = certified(("spiffe://corp/dora/metrics/prometheus",))
    check_certificate(holder, "Operator/GetStatus", NOW)
    caller = caller_by(holder, "Operator/GetStatus")
    assert caller is not None and (caller.role, caller.name) == (Role.METRICS, "prometheus")
    with refused(PermissionDenied, field="certificate", names=("metrics", "operator")):
        check_certificate(holder, "Operator/Drain", NOW)
    for now in (NOW - timedelta(days=1), NOW + timedelta(days=2)):
        with refused(Unauthenticated, field="certificate"):
            check_certificate(holder, "Operator/GetStatus", now)
    nobody = certified(("spiffe://corp/dora/nobody",))
    with refused(PermissionDenied, field="certificate", names=("nobody",)):
        check_certificate(nobody, "Operator/GetStatus", NOW)
    assert caller_by(nobody, "Operator/GetStatus") is None
    check_certificate(certified(), "Operator/Drain", NOW)  # its holder needs a token
    both = certified(("spiffe://corp/dora/host", "spiffe://corp/dora/operator"))
    found = [caller_by(both, method) for method in ("Operator/Drain", "Host/Join", "Worker/Connect")]
    assert [each.role for each in found if each is not None] == [Role.OPERATOR, Role.HOST, Role.WORKER]


def test_files_are_read_again_once_they_belong_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = cluster(tmp_path / "tls")
    own = tls(folder, "trainer")
    watched = Watched(own, lambda _, found: found.cert)
    before, other = watched.current(), another(folder, "trainer", tmp_path / "new")
    Path(own.cert).write_bytes(Path(other.cert).read_bytes())
    assert [watched.renewed() for _ in range(3)] == [(before, False)] * 3
    assert sum("not used yet" in record.message for record in caplog.records) == 1
    Path(own.key).write_bytes(Path(other.key).read_bytes())
    assert watched.renewed() == (Path(other.cert).read_bytes(), True)
    assert watched.renewed() == (Path(other.cert).read_bytes(), False)
    Path(own.ca).unlink()
    assert watched.current() == Path(other.cert).read_bytes()


def test_workers_and_pools_take_options_or_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DORA_TLS", *VARIABLES.values()):
        monkeypatch.delenv(variable, raising=False)
    folder, parser = cluster(tmp_path), argparse.ArgumentParser()
    options.add_options(parser)
    assert options.tls_of(parser.parse_args([])) is None
    own = tls(folder, "worker")
    single = ["--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", own.ca]
    assert options.tls_of(parser.parse_args(["--tls", str(folder / "worker")])) == own
    assert options.tls_of(parser.parse_args(single)) == own
    for name, value in own.environment().items():
        monkeypatch.setenv(name, value)
    assert options.tls_of(parser.parse_args([])) == own
    check_credentials("", own)
    with refused(InvalidValue, field="DORA_TOKEN"):
        check_credentials("", None)
    for unfit in (Tls(own.ca), tls(folder, "trainer")):  # none, and one that no server may use
        with refused(InvalidValue, field="tls.cert"):
            check_credentials("secret", unfit)


@pytest.mark.parametrize(
    ("own", "domain", "warns"), [(True, "", False), (False, "", True), (False, "elsewhere", False)]
)
def test_an_authority_of_others_without_a_domain_is_warned_of(
    own: bool, domain: str, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as made:
        if not own:
            made.setattr("dora.tls.authority.COMMON_NAME", "Example Corp Root")
        folder = cluster(tmp_path)
    config = validated({"tls": {"folder": str(folder / "service"), "domain": domain}})
    assert ("tls.domain" in check_tls(config)) == warns
