"""The TLS files of a service: found by its settings, and checked before a start."""

from dataclasses import replace

from dora.config import Config
from dora.kvtransfer.plane import IN_STREAM
from dora.rpc.channel import is_wildcard
from dora.tls import Tls
from dora.tls.certificate import holder_of
from dora.tls.contexts import Contexts
from dora.tls.files import LOOPBACK, check_names
from dora.tls.http import HttpTls


def tls_of(config: Config) -> Tls | None:
    """Returns the service's TLS files, or None. Raises InvalidValue if one is lacking."""
    named = config.tls
    return Tls.from_files(named.folder, cert=named.cert, key=named.key, ca=named.ca, domain=named.domain)


def contexts_of(config: Config) -> Contexts | None:
    """Returns the TLS contexts of the service's own relay, or None if it is in the clear. Raises like ``tls_of``."""
    tls = tls_of(config)
    return Contexts(tls) if tls is not None else None


def http_tls_of(config: Config) -> HttpTls | None:
    """Returns the TLS of the service's HTTP servers, or None if they are in the clear. Raises like ``tls_of``."""
    tls = tls_of(config)
    return HttpTls(tls, mutual=config.tls.clients == "certificate") if tls is not None else None


def tls_of_children(config: Config) -> Tls | None:
    """Returns the TLS files of a process of this host that connects to the service. Raises like ``tls_of``."""
    tls = tls_of(config)
    if tls is None or not is_wildcard(config.service.listen.rpartition(":")[0]):
        return tls
    return replace(tls, name=LOOPBACK[0])


def check_tls(config: Config) -> str:
    """Describes the service's TLS. Raises InvalidValue for files that a start cannot use."""
    tls = tls_of(config)
    if tls is None:
        return "none: connections are in the clear"
    from dora.tls.authority import is_of_cluster  # loads cryptography

    found = tls.check(serves=True)
    for listen in filter(None, (config.service.listen, config.service.metrics)):
        host = listen.rpartition(":")[0].strip("[]")
        check_names(tls, found, LOOPBACK[0] if is_wildcard(host) else host)
    ends = holder_of(found.cert).ends
    guarded = "certificates" if config.tls.clients == "certificate" else "a token"
    described = f"{tls.cert}, valid until {ends:%Y-%m-%d %H:%M:%S} UTC; clients show {guarded}"
    if not tls.domain and not is_of_cluster(found.ca):
        described += (
            "; warning: tls.domain is empty, so a certificate for any name such as owner.dora.svc.cluster.local is the "
            "owner's: set it, unless the authority issues certificates for this cluster alone"
        )
    unguarded = [name for name in config.kv.transports.split(",") if name not in IN_STREAM]
    return described + (f"; KV by {', '.join(unguarded)} is not guarded" if unguarded else "")
