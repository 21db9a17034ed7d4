"""The cost of mutual TLS: of the stream to a trainer, and of a KV move over TCP.

    python perf/guard.py --json

Clear and guarded rounds alternate on the same machine, and the best of each count.

stream_share        throughput of the stream under mutual TLS, by that in the clear: at least 0.75
kv_times            time of a KV move over TCP under TLS, by that in the clear, between hosts (BLAKE3): at most 2
kv_same_host_times  the same on one host (xxh3), where shm is used unless kv.transports rules it out
..._cpu_times       the same for the CPU time of the end that takes more of it, which other work does not change
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import stream
import transports

from dora.client import Trainer
from dora.kvtransfer.peer import Peer
from dora.tls import Tls
from dora.tls.authority import make_cluster

DAYS: Final = 1.0
STREAM_SHARE_MIN: Final = 0.75
KV_TIMES_MAX: Final = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1024, help="of a step of the stream")
    parser.add_argument("--tokens", type=int, default=2048, help="of each")
    parser.add_argument("--kv-mb", type=int, default=16, help="of a move")
    parser.add_argument("--part-kb", type=int, default=48, help="of a run of blocks")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of a clear and a guarded round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        certificates = Path(folder) / "tls"
        make_cluster(certificates, ["127.0.0.1"], ["trainer"], days=DAYS, authority_days=DAYS)
        found = asyncio.run(streamed(options, certificates)) | moved(options, Path(folder), certificates)
    found |= {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    kept = found["stream_share"] >= STREAM_SHARE_MIN and found["kv_times"] <= KV_TIMES_MAX
    found["within_bounds"] = kept
    print(json.dumps(found) if options.json else "\n".join(f"{name:24} {value}" for name, value in found.items()))


async def streamed(options: argparse.Namespace, certificates: Path) -> dict[str, Any]:
    own = Tls.of_folder(certificates / "trainer")
    options.rounds, rounds = 1, options.rounds  # of ``stream.best``: one that counts, after one that does not
    async with (
        stream.served(options) as clear,
        stream.served(options, certificates / "service") as guarded,
        Trainer(clear.address, token=stream.TOKEN) as in_clear,
        Trainer(guarded.address, token=stream.TOKEN, tls=own) as under_tls,
    ):
        pairs = []
        for _ in range(rounds):
            plain = await stream.best(clear, in_clear, options, stream.arrays)
            sealed = await stream.best(guarded, under_tls, options, stream.arrays)
            pairs.append((plain["trajectories_per_s"], sealed["trajectories_per_s"]))
    options.rounds = rounds
    return {
        "stream_clear_per_s": max(plain for plain, _ in pairs),
        "stream_tls_per_s": max(sealed for _, sealed in pairs),
        "stream_share": max(sealed for _, sealed in pairs) / max(plain for plain, _ in pairs),
    }


def moved(options: argparse.Namespace, folder: Path, certificates: Path) -> dict[str, Any]:
    size_bytes, part_bytes = options.kv_mb << 20, options.part_kb << 10
    body = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)
    parts = [body[at : at + part_bytes].data for at in range(0, size_bytes, part_bytes)]
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    for name, host in (("kv", "another host"), ("kv_same_host", "")):
        with ExitStack() as stack:
            ways, children = [], []
            for epoch, tls in ((10, None), (11, Tls.of_folder(certificates / "service"))):
                place = folder / f"{name}-{epoch}"
                place.mkdir()
                ours, theirs = context.Pipe()
                child = context.Process(
                    target=transports.serve, args=(theirs, str(place), size_bytes, "tcp", tls), daemon=True
                )
                child.start()
                theirs.close()
                stack.callback(child.join)
                stack.callback(ours.send, ("end",))
                told = ours.recv()
                plane, _ = stack.enter_context(transports.a_plane(place, epoch, "tcp", host, tls))
                peer = Peer("target", 1, told["address"], ("tcp",))
                ways.append(transports.planned(plane, epoch, peer, parts, ours))
                children.append(ours)
            rounds: list[list[transports.Spent]] = [
                [transports.spent(way, child) for way, child in zip(ways, children, strict=True)]
                for _ in range(transports.WARM_ROUNDS + options.rounds)
            ][transports.WARM_ROUNDS :]
        clear_s, tls_s = (min(each[at].wall_s for each in rounds) for at in (0, 1))
        clear_cpu_s, tls_cpu_s = (
            statistics.median(max(each[at].source_s, each[at].target_s) for each in rounds) for at in (0, 1)
        )
        found |= {
            f"{name}_times": tls_s / clear_s,
            f"{name}_cpu_times": tls_cpu_s / clear_cpu_s,
            f"{name}_clear_gb_per_s": size_bytes / 1e9 / clear_s,
            f"{name}_tls_gb_per_s": size_bytes / 1e9 / tls_s,
        }
    return found


if __name__ == "__main__":
    main()
