"""Chats through DORA's front, service and one worker, beside vLLM's own OpenAI server: throughput and time to a token.

    python perf/front_vllm.py --json

Both servers have the same model, engine settings and cores, and run all the time; their rounds alternate. A round is
the same conversations of several turns on either, all at a time, streamed, with logprobs and token ids, as agents of
reinforcement learning ask for them. `python3 locks/install.py vllm-server` makes the environment of vLLM's server.
"""

import argparse
import asyncio
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

import dora
from dora.models import resolve_model

TOKENS_LEAST: Final = 0.95  # of vLLM's throughput
FIRST_MOST: Final = 1.2  # times vLLM's time to a first token
START_S: Final = 600.0
VLLM: Final = ".venv-vllm-server/bin/python"
BLOCK_TOKENS: Final = 32
QUESTION: Final = "Tell me more about the quick brown fox and the lazy dog, please."
ENVIRONMENT: Final = {  # of both engines, as dora/worker/vllm/environment.py and device/cpu.py have it
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@dataclass
class Round:
    """Measurements of one round of one server."""

    tokens: int = 0
    first_ms: list[float] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.took_s


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def process(argv: list[str], **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a server, and ends it."""
    set_for_it = {**os.environ, **ENVIRONMENT, **environment}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(argv, env=set_for_it, stdout=log, stderr=subprocess.STDOUT) as running,
    ):
        try:
            yield running
        finally:
            has_ended = running.poll() is not None
            running.terminate()
            if has_ended:
                log.seek(0)
                sys.stderr.write(log.read()[-4000:].decode(errors="replace"))


def vllm_argv(python: str, folder: Path, port: int, options: argparse.Namespace) -> list[str]:
    """vLLM's server with the settings of DORA's engine (dora/worker/vllm/core.py, device/cpu.py)."""
    return [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "policy"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(options.context + options.slots)),
        *("--block-size", str(BLOCK_TOKENS), "--max-num-seqs", str(options.slots)),
        *("--max-model-len", str(options.context), "--enable-prefix-caching", "--no-async-scheduling"),
        *("--logprobs-mode", "raw_logprobs", "--disable-log-stats", "--disable-uvicorn-access-log"),
        *("--distributed-executor-backend", "uni"),
    ]


def dora_argv(folder: Path, listen: str, http: str, options: argparse.Namespace) -> list[str]:
    settings = {
        "workers.count": 1,
        "workers.slots": options.slots,
        "workers.kv_tokens": options.slots * options.context,
        "workers.max_model_len_tokens": options.context,
        "workers.block_tokens": BLOCK_TOKENS,
        "rollout.max_tokens": options.tokens,
        "sessions.forks": 64,
        "kv.pool_mb": 0,
        "reward.function": "dora.rewards.tiny:score",  # of no session here
    }
    chosen = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return [
        *(sys.executable, "-m", "dora", "serve", "--model", str(folder), "--prompts", "none", "--listen", listen),
        *("--http", http, *chosen),
    ]


async def answers(http: aiohttp.ClientSession, url: str, server: "subprocess.Popen[bytes]") -> None:
    """Waits until a server answers."""
    async with asyncio.timeout(START_S):
        while server.poll() is None:
            try:
                async with http.get(f"{url}/health") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    raise SystemExit(f"{url}: its server has ended")


async def chat(http: aiohttp.ClientSession, url: str, messages: list[Any], tokens: int, seed: int, of: Round) -> str:
    """One turn. Returns the answer's text."""
    body = {
        "model": "policy",
        "messages": messages,
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
        "logprobs": True,
        "return_token_ids": True,
        "stream": True,
    }
    asked_s, text, is_first, count = time.monotonic(), "", True, 0
    async with http.post(f"{url}/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                count += len(choice.get("token_ids") or ())
                if is_first and count:
                    of.first_ms.append(1e3 * (time.monotonic() - asked_s))
                    is_first = False
    assert count == tokens, f"{count} of {tokens} tokens"
    of.tokens += count
    return text


async def converse(http: aiohttp.ClientSession, url: str, seed: int, options: argparse.Namespace, of: Round) -> None:
    messages: list[Any] = []
    for turn in range(options.turns):
        messages.append({"role": "user", "content": f"{QUESTION} ({seed}, {turn})"})
        answer = await chat(http, url, messages, options.tokens, seed * options.turns + turn, of)
        messages.append({"role": "assistant", "content": answer})


async def play(
    http: aiohttp.ClientSession, base: str, number: int, options: argparse.Namespace, *, dora: bool
) -> Round:
    """One round of one server. Sessions are closed once it was timed."""
    found, seeds = Round(), [number * options.conversations + each for each in range(options.conversations)]
    urls = {seed: f"{base}/sessions/c{seed}" if dora else base for seed in seeds}
    began_s = time.monotonic()
    await asyncio.gather(*(converse(http, f"{urls[seed]}/v1", seed, options, found) for seed in seeds))
    found.took_s = time.monotonic() - began_s
    for url in urls.values() if dora else ():
        async with http.post(f"{url}/close", json={"reward": 0.0}) as reply:
            assert reply.status == 200, await reply.text()
    return found


@asynccontextmanager
async def servers(options: argparse.Namespace) -> AsyncIterator[tuple[aiohttp.ClientSession, dict[str, str]]]:
    """Both servers, ready, and their base URLs."""
    folder, token = resolve_model(options.model), secrets.token_urlsafe(24)
    listen, http, port = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", free_port())
    bases = {"dora": f"http://{http}", "vllm": f"http://127.0.0.1:{port}"}
    with (
        process(dora_argv(folder, listen, http, options), DORA_TOKEN=token) as ours,
        process(vllm_argv(options.vllm, folder, port, options)) as theirs,
    ):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            await asyncio.gather(answers(client, bases["dora"], ours), answers(client, bases["vllm"], theirs))
            async with dora.Trainer(listen, token=token) as trainer:
                await trainer.attach(groups=1024)
                yield client, bases


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[Round]] = {"dora": [], "vllm": []}
    async with servers(options) as (client, bases):
        for number in range(options.rounds + 1):  # the first one warms up
            for name, base in bases.items():
                found = await play(client, base, number, options, dora=name == "dora")
                if number:
                    rounds[name].append(found)
    speed = {name: statistics.median(each.tokens_per_s for each in found) for name, found in rounds.items()}
    first = {name: statistics.median(ms for each in found for ms in each.first_ms) for name, found in rounds.items()}
    paired = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in zip(*rounds.values(), strict=True)]
    ratio, first_ratio = statistics.median(paired), first["dora"] / first["vllm"]
    return {
        "tokens_vs_vllm_server": ratio,
        "tokens_vs_vllm_server_ok": ratio >= TOKENS_LEAST,
        "tokens_vs_vllm_server_rounds": paired,
        "first_token_vs_vllm_server": first_ratio,
        "first_token_vs_vllm_server_ok": first_ratio <= FIRST_MOST,
        **{f"{name}_tokens_per_s": value for name, value in speed.items()},
        **{f"{name}_first_token_ms_p50": value for name, value in first.items()},
        "model": options.model,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", default=VLLM, metavar="PYTHON", help="of an environment with vLLM's server")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--conversations", type=int, default=8, help="at a time")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    print(json.dumps(found) if options.json else "\n".join(f"{name:<32} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
