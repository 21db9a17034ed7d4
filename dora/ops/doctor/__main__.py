"""``python -m dora.ops.doctor STAGE DEVICE MODEL FOLDER``: runs one stage, and writes its verdict as a line of JSON."""

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from dora.host.placement import ORDER
from dora.ops.doctor.stages import STAGES
from dora.ops.doctor.verdict import Failed, Skipped, StageResult, Subject


def verdict_of(name: str, subject: Subject) -> StageResult:
    stage = next(each for each in STAGES if each.name == name)
    began_s = time.monotonic()
    try:
        found = stage.run(subject)
    except Skipped as error:
        return StageResult(name, "skipped", str(error))
    except Failed as error:
        trace, found, said = traceback.format_exc(), error.found, str(error)
    except Exception as error:  # a stage may meet any fault of this machine
        trace, found, said = traceback.format_exc(), {}, f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        return StageResult(name, "ok", "", found, time.monotonic() - began_s)
    return StageResult(name, "failed", said, found, time.monotonic() - began_s, trace)


def main() -> None:
    name, device, model, folder = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.environ.setdefault(ORDER, "PCI_BUS_ID")  # as workers and nvidia-smi count
    os.dup2(2, 1)  # libraries print: only the verdict is the process's output
    verdict = verdict_of(name, Subject(device, Path(model), Path(folder)))
    print(json.dumps(asdict(verdict)), file=out, flush=True)
    os._exit(0)  # an engine's threads need not be ended


if __name__ == "__main__":
    main()
