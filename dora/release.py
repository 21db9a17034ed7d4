"""The version of this release."""

from typing import Final

__version__: Final = "0.1.0"
