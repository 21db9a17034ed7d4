"""Reward functions as users might write them, good and bad. Run in reward processes by test_rewards.py."""

import os
import sys
import threading
import zlib
from typing import Any

Verifier = dict[str, Any]


def echo(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> dict[str, Any]:
    """Tells what it was given."""
    return {
        "reward": verifier["reward"],
        "components": {"tokens": len(response_token_ids)},
        "log": f"{prompt_text}|{response_text}",
    }


def parity(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> float:
    """Returns 1 for an odd sum of token ids, else 0."""
    return float(sum(response_token_ids) % 2)


def process_id(*_: object) -> int:
    return os.getpid()


def returns(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> object:
    """Returns a verdict; json reads NaN and Infinity too."""
    return verifier["result"]


def prints(*_: object) -> float:
    """Writes to stdout by every way, and reads stdin."""
    print("x" * 10_000, flush=True)
    os.write(1, b"\x00\x01\x02\x03" * 1000)
    sys.stdout.write(sys.stdin.read())
    return 0.5


def prints_and_leaves(*_: object) -> float:
    print("one")
    print("two", end="", file=sys.stderr)
    os._exit(3)


def misbehaves(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> float:
    match prompt_text:
        case "raise":
            raise ZeroDivisionError("no such luck")
        case "exit":
            sys.exit("enough")
        case "die":
            os._exit(7)
        case "hang":
            threading.Event().wait()
    return 1.0


def agrees_on_every_second(
    prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier
) -> float:
    """All responses to about half of the prompts are worth the same, those to the others hardly ever."""
    if zlib.crc32(prompt_text.encode()) % 2:
        return 1.0
    return zlib.crc32(str(response_token_ids).encode()) / 2**32


def keeps(prompt_text: str, rewards: list[float], verifier: Verifier) -> object:
    """A filter: good on the whole, or misbehaving as the prompt says."""
    if prompt_text == "raise":
        raise ZeroDivisionError("no such luck")
    return verifier.get("result", sum(rewards) >= verifier.get("least", 0.0))


def surroundings(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> Any:
    """Says which variables, open pipes and folder it has."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    pipes = [os.readlink(link) for link in links if os.path.exists(link)]
    return {"reward": 1.0, "log": "|".join([" ".join(os.environ), " ".join(pipes), os.getcwd()])}
