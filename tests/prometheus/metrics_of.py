"""The metrics that an expression of PromQL names."""

import re
from typing import Final

_NAME: Final = re.compile(r"(?<![\w:])((?:dora|vllm|process)[_:][\w:]*|up)\b(?!\s*=)")
_SUFFIX: Final = re.compile(r"_(bucket|sum|count)$")


def metrics_of(expression: str) -> set[str]:
    """Returns the names of metrics, histograms without the ending of their series; recorded series are left out."""
    found = {name for name in _NAME.findall(re.sub(r'"[^"]*"', '""', expression)) if not name.startswith("dora:")}
    return {_SUFFIX.sub("", name) for name in found}
