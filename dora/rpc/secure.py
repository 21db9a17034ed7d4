"""TLS of gRPC connections. Files are read again when they change: at a service for each handshake, at a client for each
connection that it opens.
"""

from typing import Any

import grpc

from dora.tls import Tls
from dora.tls.files import Material
from dora.tls.watched import Watched


def server_credentials(tls: Tls, *, mutual: bool) -> grpc.ServerCredentials:
    """Returns a service's credentials. If ``mutual``, only clients with a certificate of the authority connect.

    Raises InvalidValue for files that a server cannot use.
    """
    tls.check(serves=True)
    watched = Watched(tls, lambda _, found: _configuration(found, mutual))

    def changed() -> Any:  # None: they are as before, which gRPC's type stubs do not know
        configuration, is_new = watched.renewed()
        return configuration if is_new else None

    return grpc.dynamic_ssl_server_credentials(watched.current(), changed, require_client_authentication=mutual)


def client_credentials(tls: Tls) -> Watched[grpc.ChannelCredentials]:
    """Returns a client's credentials. Raises InvalidValue for files that a client cannot use."""
    tls.check()
    return Watched(tls, lambda _, found: grpc.ssl_channel_credentials(found.ca, found.key or None, found.cert or None))


def _configuration(found: Material, mutual: bool) -> grpc.ServerCertificateConfiguration:
    pairs = [(found.key, found.cert)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=found.ca if mutual else None)
