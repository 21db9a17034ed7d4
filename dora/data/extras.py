"""The optional packages, as messages name them."""


def install(*extras: str) -> str:
    """The command that installs extras. DORA is on no package index, so it names a checkout (docs/install.md)."""
    return f"pip install '.[{','.join(extras)}]' in a checkout of DORA"
