"""OpenSSL's own view of certificates: contexts, and a handshake within this process."""

import ssl


def context_of(ca: str, cert: str, key: str, *, server: bool) -> ssl.SSLContext:
    """Returns a context with the files as they are now, for connections in which both ends show certificates. No host
    name is checked. Raises ssl.SSLError and OSError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cafile=ca)
    context.load_cert_chain(cert, key)
    if server:
        context.num_tickets = 0  # no connection is resumed: each begins with certificates
    return context


def refusal(ca: str, cert: str, key: str, *, as_server: bool) -> str:
    """Returns why the other end of a connection would refuse this certificate, or an empty text."""
    own = context_of(ca, cert, key, server=as_server)
    other = context_of(ca, cert, key, server=not as_server)
    own.verify_mode = ssl.CERT_NONE  # only the other's view counts here
    ways = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        own.wrap_bio(ways[0], ways[1], server_side=as_server),
        other.wrap_bio(ways[1], ways[0], server_side=not as_server),
    )
    for _ in range(4):  # more than a handshake's ways
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return error.reason or str(error)
    return ""
