"""How fast KV blocks leave a GPU and enter it, against one copy of as many bytes, in one run.

    python perf/gpu_blocks.py --json

    show_vs_memcpy     scattered blocks of all layers into pinned memory, against one ``cudaMemcpyAsync`` to it
    write_vs_memcpy    blocks from ordinary memory until they lie in the KV-cache, against one from pinned memory

Ratios are medians over rounds, for each layout. Needs torch with CUDA and no vLLM. Where there is no GPU this says so
and measures nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dora.worker.copying.cuda_blocks import DeviceStore

LAYERS: Final = 32
HEADS, TOKENS, CONTENT = 8, 16, 256  # of a block: 64 KiB in bfloat16
LAYOUTS: Final = ("LBNHC", "BLNHC", "LHBNC")  # blocks of one run, with other layers' between them, of one run a head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="of one request")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        said = "there is no NVIDIA GPU here: nothing was measured"
        print(json.dumps({"gpu": None, "why": said}) if options.json else said)
        return
    found = {layout: measured(layout, options.megabytes << 20, options.rounds) for layout in LAYOUTS}
    if options.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), **found}))
    else:
        Console(width=100).print(table(found))


def measured(layout: str, size_bytes: int, rounds: int) -> dict[str, float]:
    """Ratios, and what the single copies reach."""
    count = max(1, size_bytes // (LAYERS * HEADS * TOKENS * CONTENT * 2))
    store = DeviceStore(tensors(layout, 2 * count), {f"layer.{layer:02}": 0 for layer in range(LAYERS)}, 2 * count)
    ids = np.random.default_rng(0).permutation(2 * count)[:count].tolist()
    blocks = {name: [np.full((count, size), 1, np.uint8)] for name, size in store.layers}
    moved = count * sum(size for _, size in store.layers)
    there = torch.zeros(moved, dtype=torch.uint8, device="cuda")
    here = torch.zeros(moved, dtype=torch.uint8, pin_memory=True)
    ratios: dict[str, list[float]] = {"show": [], "write": []}
    bare: dict[str, list[float]] = {"show": [], "write": []}
    for number in range(rounds + 1):
        took = {
            "out": timed(lambda: here.copy_(there, non_blocking=True)),
            "show": timed(lambda: store.show([ids])),
            "in": timed(lambda: there.copy_(here, non_blocking=True)),
            "write": timed(lambda: store.write([ids], blocks)),
        }
        if number:  # the first one takes memory
            for name, limit in (("show", "out"), ("write", "in")):
                ratios[name].append(took[limit] / took[name])
                bare[name].append(moved / took[limit] / 1e9)
    medians = {f"{name}_vs_memcpy": statistics.median(each) for name, each in ratios.items()}
    limits = {f"{name}_memcpy_gb_per_s": statistics.median(each) for name, each in bare.items()}
    return {name: round(value, 3) for name, value in (medians | limits).items()}


def tensors(layout: str, blocks: int) -> dict[str, torch.Tensor]:
    """A layer's KV as (B, H, N, C), all of it in one buffer."""
    lengths = {"L": LAYERS, "B": blocks, "H": HEADS, "N": TOKENS, "C": CONTENT}
    buffer = torch.zeros([lengths[axis] for axis in layout], dtype=torch.bfloat16, device="cuda")
    ordered = buffer.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layer.{number:02}": ordered[number] for number in range(LAYERS)}


def timed(copy: Callable[[], Any]) -> float:
    """Until all of it is done on the device."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    copy()
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def table(found: dict[str, dict[str, float]]) -> Table:
    made = Table(title=f"KV blocks of a {torch.cuda.get_device_name()}, against one copy")
    for heading in ("layout", "show", "bare GB/s", "write", "bare GB/s"):
        made.add_column(heading, justify="left" if heading == "layout" else "right")
    for layout, each in found.items():
        row = [f"{each['show_vs_memcpy']:.0%}", f"{each['show_memcpy_gb_per_s']:.1f}"]
        row += [f"{each['write_vs_memcpy']:.0%}", f"{each['write_memcpy_gb_per_s']:.1f}"]
        made.add_row(layout, *row)
    return made


if __name__ == "__main__":
    main()
