"""``python -m dora.weights.first_version FOLDER``: the canary of version 0, computed by transformers in float32.

It runs in a process of its own, because a service loads no torch. It prints JSON with the canary and with warnings. If
the folder lacks weights, which transformers would replace by random ones, the exit code is 2, and stderr names them. If
the logprobs are not finite, the exit code is 3.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from dora.errors import InvalidValue
from dora.weights.canary import check_canary, compute_canary

NAMES_MAX = 3
LACKS: Final = 2  # exit code for a folder without some weights
BAD_LOGPROBS: Final = 3  # and for weights that give logprobs that are not finite


def main(arguments: list[str]) -> int:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    folder = Path(arguments[0])
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", output_loading_info=True)
    module, report = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            print(_listed(report[kind]), file=sys.stderr)
            return LACKS
    warnings = []
    if report.get("unexpected_keys"):
        unused = _listed(report["unexpected_keys"])
        warnings.append(f"a trainer with transformers ignores tensors of the checkpoint: {unused}")
    canary = compute_canary(module)
    try:
        check_canary(canary, int(module.config.vocab_size))
    except InvalidValue as error:
        print(error, file=sys.stderr)
        return BAD_LOGPROBS
    print(json.dumps({"token_ids": canary.token_ids, "logprobs": canary.logprobs, "warnings": warnings}))
    return 0


def _listed(names: Any) -> str:
    shown = sorted(map(str, names))
    return ", ".join(shown[:NAMES_MAX]) + (f" and {len(shown) - NAMES_MAX} others" if len(shown) > NAMES_MAX else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
