"""``python -m dora.ops.doctor.nccl FOLDER``: sends bytes from GPU 0 to GPU 1 by NCCL, in two processes."""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

SIZE_BYTES = 256 << 20
TIMEOUT_S = 60.0


def member(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl", init_method=f"file://{folder}/nccl", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    sent = torch.arange(SIZE_BYTES // 4, dtype=torch.int32, device="cuda")
    came = sent if rank == 0 else torch.zeros_like(sent)
    distributed.barrier()
    began_s = time.perf_counter()
    if rank == 0:
        distributed.send(sent, 1)
    else:
        distributed.recv(came, 0)
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began_s
    if not torch.equal(came, sent):
        raise SystemExit("the bytes that came are not those that were sent")
    if rank == 1:
        Path(folder, "nccl.json").write_text(json.dumps({"gb_per_s": round(SIZE_BYTES / took_s / 1e9, 2)}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(member, (sys.argv[1],), nprocs=2)
    print(Path(sys.argv[1], "nccl.json").read_text())
