"""Reward functions that do what they should not, run in user processes by test_rewards.py."""

import asyncio
import ctypes
import mmap
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import numpy as np

Verifier = dict[str, Any]
WRONG = -1.0  # what no right answer is


def forks(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> float:
    """Both sides of a fork come back, the child at once and with another answer."""
    match prompt_text:
        case "os":
            child = os.fork()
        case "libc":  # without Python's knowledge
            child = ctypes.CDLL(None).fork()
        case "multiprocessing":
            process = multiprocessing.get_context("fork").Process(target=_writes_everywhere)
            process.start()
            process.join()
            return float(verifier["reward"])
        case "twice":
            return _of_a_grandchild(verifier["reward"])
        case _:
            raise AssertionError(prompt_text)
    if not child:
        return WRONG
    os.waitpid(child, 0)
    return float(verifier["reward"])


def _of_a_grandchild(reward: float) -> float:
    """Has a grandchild write into its grandparent's pipe, under any number that was free."""
    child = os.fork()
    if child:
        return reward if os.waitpid(child, 0)[1] == 0 else WRONG
    pipes = [os.pipe() for _ in range(8)]
    if not os.fork():
        os._exit(sum(os.write(writing, b"x") for _, writing in pipes) - 8)
    os._exit(os.wait()[1])


def _writes_everywhere() -> None:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\x00\x00\x00\x00")
        except OSError:
            continue


def writes_everywhere(prompt_text: str, *_: object) -> float:
    """Writes into every descriptor it finds, as the prompt says: junk, or the length of a frame that never comes."""
    content = {"junk": b"junk" * 4, "long": b"\xff\xff\xff\x7f", "half": b"\x10\x00\x00\x00\x81"}.get(prompt_text, b"")
    for descriptor in range(3, 64) if content else ():
        try:
            os.write(descriptor, content)
        except OSError:
            continue
    return 1.0


def closes_everything(prompt_text: str, *_: object) -> float:
    if prompt_text == "close":
        os.closerange(0, 64)
    return 1.0


def kills_its_parent(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> float:
    if prompt_text == "kill":
        os.open(verifier["alive"], os.O_WRONLY)
        os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait()
    return 1.0


def leaves_behind(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> float:
    """Starts a process in a session of its own, whose parent ends at once. It holds the pipe ``verifier["alive"]``."""
    alive = os.open(verifier["alive"], os.O_WRONLY)
    script = "import os, threading; os.fork() and os._exit(0); os.setsid(); threading.Event().wait()"
    subprocess.run([sys.executable, "-c", script], pass_fds=[alive], check=True)
    os.close(alive)
    if prompt_text == "hang":
        threading.Event().wait()
    return 1.0


def never_waits(*_: object) -> float:
    """Leaves five processes that have ended, each time."""
    for _number in range(5):
        if not os.fork():
            os._exit(0)
    return 1.0


LEAKED: list[Any] = []  # what no call gives back
LEAK_BYTES = 8 << 20


def leaks(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> float:
    """Keeps something at each call, and notes in a file that it was called."""
    with open(verifier["judged"], "a", encoding="ascii") as judged:
        judged.write(f"{verifier['reward']}\n")
    LEAKED.append(_leaked(prompt_text))
    return float(verifier["reward"])


def _leaked(what: str) -> Any:
    match what:
        case "objects":
            return b"x" * LEAK_BYTES
        case "untouched":
            return np.zeros(LEAK_BYTES, np.uint8)
        case "shared":
            return _shared(LEAK_BYTES)
        case "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        case "files":
            return [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
        case "sockets":
            return socket.socketpair()
        case "children":
            return _child()
        case "memory of children":
            return _child(LEAK_BYTES)
    return None


def _shared(size_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size_bytes)
    for _number in range(size_bytes // LEAK_BYTES):
        memory.write(b"x" * LEAK_BYTES)
    return memory


def _child(size_bytes: int = 0) -> int:
    """A process that waits, with memory of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        os.read(reading, 1)  # once it has its memory
        os.close(reading)
        return child
    held = b"x" * size_bytes
    os.close(writing)
    threading.Event().wait()
    os._exit(len(held))


class Large:
    def __str__(self) -> str:
        return "x" * (300 << 20)


def takes(what: str, *_: object) -> object:
    """Takes more than it may in one call."""
    match what:
        case "bytes":
            bytearray(300 << 20)
        case "numpy":
            np.ones(300 << 20, np.uint8)
        case "small objects":
            LEAKED.append([])
            while True:
                LEAKED[-1].append(object())
        case "caught":
            try:
                bytearray(300 << 20)
            except MemoryError as error:
                raise ValueError("no reward") from error
        case "quoted":
            raise RuntimeError("child: Cannot allocate memory")
        case "result":
            return {"reward": 1.0, "log": Large()}
        case "long error":
            raise MemoryError("x" * 10_000)
        case "shared" | "shared and prints":
            for _number in range(40):
                LEAKED.append(_shared(LEAK_BYTES))
            while what == "shared and prints":
                print("x" * 1000)
            threading.Event().wait()
        case "memory of children":
            LEAKED.extend(_child(10 * LEAK_BYTES) for _ in range(5))
            threading.Event().wait()
        case "files":
            while True:
                LEAKED.append(os.open(os.devnull, os.O_RDONLY))
        case "children":
            LEAKED.extend(_child() for _ in range(40))
            threading.Event().wait()
    return 1.0


def drops_and_leaks(prompt_text: str, rewards: list[float], verifier: Verifier) -> bool:
    LEAKED.append(_leaked(prompt_text))
    takes(prompt_text)
    return False


def grows_when_idle(*_: object) -> float:
    """Takes memory after the verdict."""
    threading.Thread(target=lambda: LEAKED.append(_shared(40 * LEAK_BYTES))).start()
    return float(os.getpid())


def limits_seen(*_: object) -> dict[str, Any]:
    """The resources of the function's process, and its id."""
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "reward": 1.0,
        "components": {"memory_mb": soft_bytes >> 20, "open_files": files, "process": os.getpid()},
    }


def keeps_within_limits(prompt_text: str, rewards: list[float], verifier: Verifier) -> bool:
    """Keeps a group only if it has the limits of the test."""
    seen = limits_seen()["components"]
    return bool((seen["memory_mb"], seen["open_files"]) == (512, 100))


def prints(prompt_text: str, *_: object) -> float:
    """10 MB to each output."""
    for _number in range(10):
        print("x" * (1 << 20))
        os.write(2, b"y" * (1 << 20))
    return 1.0


def returns(prompt_text: str, *_: object) -> object:
    """A value that JSON cannot say, by its name."""
    value = VALUES[prompt_text]
    return value() if callable(value) else value


class Awkward:
    """Nothing may be asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __float__ = __len__ = item = __repr__
    ndim = 0


class AwkwardError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


VALUES: dict[str, object] = {
    "np.bool_": np.bool_(True),
    "np.float32": np.float32(0.5),
    "np.int64": np.int64(2),
    "array of no dimension": np.array(0.5),
    "bool": True,
    "nan": float("nan"),
    "infinity": np.float64("inf"),
    "complex": 1j,
    "np.complex64": np.complex64(1),
    "text": "1",
    "bytes": b"1",
    "none": None,
    "array": np.array([1.0]),
    "10,000 digits": 10**10_000,
    "awkward": Awkward(),
    "awkward component": {"reward": 1.0, "components": {"a": Awkward()}},
    "awkward log": {"reward": 1.0, "log": Awkward()},
    "half a character": {"reward": 1.0, "log": "a\ud800", "components": {"b\ud800": 1.0}},
    "a million components": lambda: {"reward": 1.0, "components": {str(i): 1.0 for i in range(1_000_000)}},
    "a long component": lambda: {"reward": 1.0, "components": {"x" * 10_000_000: 1.0}},
    "a long log": lambda: {"reward": 1.0, "log": "é" * 50_000_000},
    "the largest": {
        "reward": 1.0,
        "log": "\N{GRINNING FACE}" * 20_000,
        "components": {f"{i:0200}": i for i in range(128)},
    },
}


def returns_anything(prompt_text: str, *_: object) -> object:
    return anything(random.Random(int(prompt_text)))


def anything(chance: random.Random, depth: int = 0) -> Any:
    """Returns a value of any kind, as likely right as wrong."""
    leaves = [*list(VALUES.values())[:17], 0, -1.5, 1 << 70, "", "\0", b"", [], {}, object()]
    kind = chance.randrange(6 if depth < 3 else 1)
    if kind == 1:
        return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind >= 2:
        keys = ["reward", "components", "log", "failure", "ticket", "ended", "é\ud800", 1, None]
        return {chance.choice(keys): anything(chance, depth + 1) for _ in range(chance.randrange(6))}
    return chance.choice(leaves)


async def asynchronous(
    prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier
) -> dict[str, Any]:
    await asyncio.sleep(0)
    if prompt_text == "raise":
        raise ZeroDivisionError("no such luck")
    if prompt_text == "hang":
        await asyncio.Event().wait()
    return {"reward": np.float32(verifier["reward"])}


async def keeps_asynchronously(prompt_text: str, rewards: list[float], verifier: Verifier) -> Any:
    return np.bool_(sum(rewards) > 0)


def raises_awkwardly(*_: object) -> float:
    raise AwkwardError


def raises_many_lines(*_: object) -> float:
    raise ValueError("first\nsecond\x1b[31m" + "x" * 1_000_000)


def of_the_wrong_arity(prompt_text: str, completion: str) -> float:
    return 1.0


def with_a_required_keyword(
    prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier, *, tokenizer: object
) -> float:
    return 1.0


def generates(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> Any:
    yield 1.0


not_callable = 0.5


def verdict_then_ends(prompt_text: str, *_: object) -> float:
    """Ends its process after the verdict."""
    threading.Thread(target=_ends_when_idle).start()
    return 1.0


def _ends_when_idle() -> None:
    os._exit(3)


def changes(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> object:
    """Forks, leaves a process behind, returns too much, or ends, by the response; else says how long it is."""
    length = len(response_token_ids)
    match sum(response_token_ids) % 6:
        case 0:
            if not os.fork():
                return WRONG
        case 1:
            return {"reward": 1.0, "components": {str(i): 1.0 for i in range(100_000)}}
        case 2:
            return {"reward": float(length), "log": "x" * 100_000_000}
        case 3:
            os._exit(9)
    return float(length)
