"""The TLS options of programs that argparse reads: workers, pools and trainers."""

import argparse
from typing import Final

from dora.tls.files import Tls

CLIENTS: Final = ("certificate", "token")  # how clients of a server identify themselves, at least


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls", default="", metavar="DIR", help="folder with cert.pem, key.pem and ca.pem; default: DORA_TLS, or none"
    )
    parser.add_argument("--tls-cert", default="", metavar="FILE", help="this end's certificate; default: DORA_TLS_CERT")
    parser.add_argument("--tls-key", default="", metavar="FILE", help="its key; default: DORA_TLS_KEY")
    parser.add_argument(
        "--tls-ca", default="", metavar="FILE", help="the authorities whose certificates count; default: DORA_TLS_CA"
    )


def tls_of(options: argparse.Namespace) -> Tls | None:
    """Returns the files of the options, or of the environment. Raises InvalidValue for some without the others."""
    tls = Tls.from_files(options.tls, cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca)
    return tls or Tls.from_environment()
