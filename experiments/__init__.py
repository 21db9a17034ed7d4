"""The papers' tables, and what was tried: run beside the package, and not shipped with it (README.md)."""
