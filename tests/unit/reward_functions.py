"""Reward functions as users might write them, good and bad. Run in reward processes by test_rewards.py."""

import os
import sys
import threading
from typing import Any

Verifier = dict[str, Any]


def echo(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> dict[str, Any]:
    """Tells what it was given."""
    return {
        "reward": verifier["reward"],
        "components": {"tokens": len(response_token_ids)},
        "log": f"{prompt_text}|{response_text}",
    }


def process_id(*_: object) -> int:
    return os.getpid()


def returns(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: Verifier) -> object:
    """What the verifier says; json reads NaN and Infinity too."""
    return verifier["result"]


def prints(*_: object) -> float:
    """Writes to stdout by every way, and reads stdin."""
    print("x" * 10_000, flush=True)
    os.write(1, b"\x00\x01\x02\x03" * 1000)
    sys.stdout.write(sys.stdin.read())
    return 0.5


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
