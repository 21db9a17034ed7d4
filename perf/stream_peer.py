"""TransferQueue's side of perf/stream.py, which runs this in a virtual environment that has it. Prints one JSON object.

A partition is put and got in batches: once one after the other, once by two processes at the same time. Its own
settings but ``polling_mode``, without which a reader that is ahead waits in turns of a second.
"""

import argparse
import importlib
import json
import os
import time
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
ray: Any = importlib.import_module("ray")
torch: Any = importlib.import_module("torch")
transfer_queue: Any = importlib.import_module("transfer_queue")
omegaconf: Any = importlib.import_module("omegaconf")
TensorDict: Any = importlib.import_module("tensordict").TensorDict

FIELDS = ["token_ids", "logprobs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--units", type=int, default=2, help="storage units")
    options = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    settings = {
        "controller": {"polling_mode": True},
        "backend": {"SimpleStorage": {"num_data_storage_units": options.units}},
    }
    transfer_queue.init(omegaconf.OmegaConf.create(settings))
    remote_producer = ray.remote(num_cpus=1)(Producer).remote(options.tokens, options.batch)
    trajectories = options.batch * options.batches
    found: dict[str, list[float]] = {"put": [], "get": [], "put_and_get": []}
    for number in range(options.rounds + 1):
        took_s = ray.get(remote_producer.put.remote(f"apart{number}", options.batches))
        found["put"].append(trajectories / took_s)
        found["get"].append(trajectories / taken_s(f"apart{number}", options))
        began_s = time.monotonic()
        putting = remote_producer.put.remote(f"together{number}", options.batches)
        taken_s(f"together{number}", options)
        found["put_and_get"].append(trajectories / (time.monotonic() - began_s))
        ray.get(putting)
    best = {f"{name}_per_s": max(rates[1:]) for name, rates in found.items()}  # the first is for what is made once
    print(json.dumps({"version": transfer_queue.__version__, "batch": options.batch, "units": options.units, **best}))
    transfer_queue.close()
    ray.shutdown()


class Producer:
    """Puts the same arrays again and again, in a process of its own."""

    def __init__(self, tokens: int, batch: int) -> None:
        transfer_queue.init()
        token_ids = torch.randint(3, 50_000, (batch, tokens), dtype=torch.int32)
        self._batch = TensorDict({"token_ids": token_ids, "logprobs": -torch.rand(batch, tokens)}, batch_size=batch)

    def put(self, partition: str, batches: int) -> float:
        """The seconds that it took."""
        client = transfer_queue.get_client()
        began_s = time.monotonic()
        for _ in range(batches):
            client.put(self._batch, partition_id=partition)
        return time.monotonic() - began_s


def taken_s(partition: str, options: argparse.Namespace) -> float:
    """Returns the time to get all batches of a partition as tensors."""
    client = transfer_queue.get_client()
    began_s, left = time.monotonic(), options.batches
    while left:
        batch = client.get_meta(FIELDS, options.batch, partition, task_name="train")
        if batch.size:
            tensors = client.get_data(batch)
            assert len(tensors) == options.batch and set(FIELDS) <= set(tensors.keys())
            left -= 1
    took_s = time.monotonic() - began_s
    client.clear_partition(partition)
    return took_s


if __name__ == "__main__":
    main()
