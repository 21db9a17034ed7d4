"""The options of workers and pools that name their TLS files, and the credentials that they need."""

import argparse

from dora.errors import InvalidValue
from dora.tls import Tls


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls", default="", help="folder with cert.pem, key.pem and ca.pem; default: DORA_TLS, or none"
    )
    parser.add_argument("--tls-cert", default="", help="this machine's certificate; default: DORA_TLS_CERT")
    parser.add_argument("--tls-key", default="", help="its key; default: DORA_TLS_KEY")
    parser.add_argument("--tls-ca", default="", help="the authorities whose certificates count; default: DORA_TLS_CA")


def tls_of(options: argparse.Namespace) -> Tls | None:
    """Returns the files of the options, or of the environment. Raises InvalidValue for some without the others."""
    given = Tls.given(options.tls, cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca)
    return given or Tls.from_environment()


def check_token(token: str, tls: Tls | None) -> None:
    """Raises InvalidValue for a worker or pool without a token and without a certificate."""
    if not token and (tls is None or not tls.cert):
        raise InvalidValue("DORA_TOKEN", "", "the service's worker token, in the environment, or a certificate (--tls)")
