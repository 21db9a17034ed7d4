"""TLS: the files of a certificate, what a certificate says of its holder, and a small private authority."""

from dora.tls.files import Tls as Tls
