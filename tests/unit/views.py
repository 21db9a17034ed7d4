"""Hand-made views for tests of planners."""

from typing import Any

import numpy as np

from dora.core.view import RequestColumns, View, WorkerColumns

KV_TOKENS, SLOTS, PROMPT_TOKENS, MAX_TOKENS = 1000, 64, 10, 30_000


def make_view(workers: list[dict[str, Any]], requests: list[tuple[int, int, int]] = (), **fields: Any) -> View:
    """``workers``: loaded (= target) and what differs; ``requests``: (version, index, context), prompts of 10 tokens.

    Lengths are known, and all have ``remaining_tokens`` to come; or believed, with ``belief`` (log mean, log sd).
    """
    rows = [{"target": worker["loaded"], **worker} for worker in workers]

    def column(name: str, default: int = 0) -> np.ndarray:
        return np.array([row.get(name, default) for row in rows], dtype=np.int64)

    version, index, context = np.array(requests, dtype=np.int64).reshape(-1, 3).T
    on = [np.flatnonzero(index == place) for place in range(len(rows))]
    kv = np.array([int(context[held].sum()) for held in on], dtype=np.int64)
    columns = WorkerColumns(
        alive=column("alive", 1).astype(bool),
        loaded=column("loaded"),
        target=column("target"),
        draining=column("draining").astype(bool),
        slots=column("slots", SLOTS),
        assigned=np.array([len(held) for held in on], dtype=np.int64),
        kv_tokens=column("kv_tokens", KV_TOKENS),
        kv_claimed=kv,
        kv_expected=kv,
        kv_used=kv,
        waiting=column("waiting"),
        step_scale=np.array([row.get("step_scale", 1.0) for row in rows]),
        zone=column("zone"),
    )
    newest = fields.pop("newest", max((row["loaded"] for row in rows), default=0))
    ones = np.ones(len(version), dtype=bool)
    log_mean, log_sd = fields.pop("belief", (0.0, 0.0))
    table = RequestColumns(
        unfinished=ones,
        movable=ones & (index >= 0),
        version=version,
        worker=index,
        prompt_tokens=np.full(len(version), PROMPT_TOKENS),
        tokens=context - PROMPT_TOKENS,
        expected_tokens=context - PROMPT_TOKENS + np.int64(fields.pop("remaining_tokens", 50)),
        max_tokens=np.full(len(version), MAX_TOKENS),
        log_mean=np.full(len(version), log_mean),
        log_sd=np.full(len(version), log_sd),
    )
    known: dict[str, Any] = {
        "now_s": 0.0, "step": newest, "newest": newest, "window": 3, "groups_per_step": 4, "admissible": {},
        "cost": None, "group_tokens": 100.0, "group_kv_tokens": 100.0, "backlog_longest": np.array([])
    }  # fmt: skip
    return View(**{**known, **fields}, workers=columns, requests=table)
