"""LMCache's multi-process server for one service: ``python -P server.py RUN_FOLDER SIZE_MB CHUNK_TOKENS``.

This script imports nothing of DORA: ``kv.tier_python`` may name the Python of an environment with little more than
LMCache, whose requirements (numpy, protobuf, setuptools, OpenTelemetry) are older than vLLM's. Without arguments it
prints the version of LMCache that it would run.

LMCache's own command listens on TCP ports without a token, for requests and for an HTTP interface that changes its
settings; some requests unpickle their data. This server has one Unix socket, which only this user can open, and answers
only the requests that DORA sends. Its contents are reported on stdout, one JSON object per second; its log goes to
stderr. It ends at SIGTERM, or when its stdout is closed.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

VERSION = "0.5.6"  # of LMCache, whose protocol has no version of its own
ANSWERED = {
    "commit_retrieve",
    "commit_store",
    "end_session",
    "free_lookup_locks",
    "get_chunk_size",
    "lookup",
    "ping",
    "prepare_retrieve",
    "prepare_store",
    "register_kv_cache_engine_driven_context",
    "unregister_kv_cache_engine_driven_context",
    "wait_prefetch_status",
}
SEGMENT_PREFIX = "lmcache_l1_pool_"
SOCKET_PATH_MAX = 107  # bytes
FORGET_S = 60  # a worker that is silent this long is forgotten
TELL_S = 1.0


def main() -> None:
    if len(sys.argv) == 1:
        try:
            print(importlib.metadata.version("lmcache"))
        except importlib.metadata.PackageNotFoundError:
            print("none")
        return
    run_folder, size_mb, chunk_tokens = sys.argv[1:]
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # no usage reports
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server, cache = start(Path(run_folder), float(size_mb) / 1024, chunk_tokens)
    try:
        tell(cache)
        while not stop.wait(TELL_S):
            tell(cache)
    except BrokenPipeError:
        pass
    server.close()
    cache.close()  # frees the shared memory
    os._exit(0)  # LMCache's threads would keep running


def socket_of(run_folder: Path) -> Path:
    return run_folder / "kv-tier.sock"


def segment_of(run_folder: Path) -> str:
    """Returns the name of its shared memory, which LMCache appends to ``SEGMENT_PREFIX``."""
    return f"dora-{hashlib.sha256(os.fsencode(run_folder.resolve())).hexdigest()[:16]}"


def remove_left(run_folder: Path) -> None:
    """Removes the files of a server that was killed."""
    Path("/dev/shm", SEGMENT_PREFIX + segment_of(run_folder)).unlink(missing_ok=True)
    socket_of(run_folder).unlink(missing_ok=True)


def start(run_folder: Path, size_gb: float, chunk_tokens: str) -> tuple[Any, Any]:
    """Starts the server as LMCache's own command does, except for the socket and the set of requests."""
    from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
    from lmcache.v1.mp_observability.config import add_observability_args, parse_args_to_observability_config
    from lmcache.v1.multiprocess import config, server

    parser = argparse.ArgumentParser()
    config.add_mp_server_args(parser)
    config.add_coordinator_args(parser)
    add_storage_manager_args(parser)
    add_observability_args(parser)
    arguments = ["--host", "127.0.0.1", "--port", "0", "--disable-observability", "--eviction-policy", "LRU"]
    arguments += ["--max-workers", "4", "--supported-transfer-mode", "engine_driven", "--chunk-size", chunk_tokens]
    arguments += ["--l1-size-gb", repr(size_gb), "--no-l1-use-lazy", "--shm-name", segment_of(run_folder)]
    arguments += ["--worker-reap-timeout-seconds", str(FORGET_S), "--worker-registration-grace-seconds", str(FORGET_S)]
    options = parser.parse_args(arguments)
    server.create_request_server = lambda modules, settings, **_: on_socket(modules, settings, socket_of(run_folder))
    request_server, cache = server.run_cache_server(
        config.parse_args_to_mp_server_config(options),
        parse_args_to_config(options),
        parse_args_to_observability_config(options),
        return_engine=True,
        start_prometheus_http_server=False,
        coordinator_config=config.parse_args_to_coordinator_config(options),
    )
    if not cache.context.shm_pool_info["shm_name"]:
        sys.exit("no room in /dev/shm: LMCache would send KV as pickles")
    return request_server, cache


def on_socket(modules: list[Any], settings: Any, socket: Path) -> Any:
    """Moves LMCache's request server, before it serves, from its TCP port to a Unix socket."""
    import zmq
    from lmcache.v1.multiprocess.transport.zmq_impl.server import build_zmq_request_server

    made = build_zmq_request_server(modules, settings)
    made.socket.unbind(made.socket.getsockopt_string(zmq.LAST_ENDPOINT))
    made.handlers = {name: handler for name, handler in made.handlers.items() if name in ANSWERED}
    os.umask(0o077)
    made.socket.bind(f"ipc://{socket}")
    return made


def tell(cache: Any) -> None:
    """Writes used bytes, capacity and number of chunks on one line."""
    held = cache.storage_manager.report_status()["l1_manager"]
    announcement = {
        "used_bytes": held["memory_used_bytes"],
        "size_bytes": held["memory_total_bytes"],
        "chunks": held["total_object_count"],
    }
    print(json.dumps(announcement), flush=True)


if __name__ == "__main__":
    main()
