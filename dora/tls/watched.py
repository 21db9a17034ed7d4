"""TLS files that are read again when they change, for connections that begin afterwards."""

import logging
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from dora.errors import InvalidValue
from dora.tls.files import Material, Signature, Tls

log: Final = logging.getLogger("dora.tls")

Made = TypeVar("Made")


class Watched(Generic[Made]):
    """The result of ``make`` for the files, made again after they have changed. Thread-safe.

    Files that do not belong together, for example while a new pair is being written, are left alone until they do: what
    was made before stays in use, and one line is logged.
    """

    def __init__(self, tls: Tls, make: Callable[[Tls, Material], Made]) -> None:
        """Raises InvalidValue for files that cannot be used."""
        self.tls = tls
        self._make = make
        self._lock = threading.Lock()
        self._signature = self._signed()
        self._made = make(tls, tls.read())
        self._refused = ""

    def current(self) -> Made:
        return self.renewed()[0]

    def renewed(self) -> tuple[Made, bool]:
        """Returns the present result, and whether this call has made it."""
        with self._lock:
            signature = self._signed()
            if signature == self._signature:
                return self._made, False
            try:
                self._made = self._make(self.tls, self.tls.check())
            except (InvalidValue, OSError) as error:
                if str(error) != self._refused:
                    log.warning("the new TLS files are not used yet: %s", error)
                self._refused = str(error)
                return self._made, False
            self._signature, self._refused = signature, ""
            log.info("the TLS files were read again")
            return self._made, True

    def _signed(self) -> Signature:
        try:
            return self.tls.signature()
        except OSError:
            return ()  # being replaced
