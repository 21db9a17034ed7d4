"""What drafts bring one engine on a CPU, and how the sources of drafts compare.

    python perf/speculation.py

A tiny model learns two tasks, for about a minute: counting from a number, and loops of tool calls, whose names come
from the prompt and whose remarks are free. One engine then samples groups of responses, at temperature 1, without
drafts, with the history of this epoch, with that of an earlier one too (fleet), and with the requests' own tokens, at
several batches. The responses are checked to be equal.
Rates are tokens per second of the process's CPU time, which other load on the machine disturbs little, and by the
clock.

The sources are compared without an engine: they draft for the recorded responses, and the accepted tokens are counted.
The fleet's history has the group's siblings from another worker and the prompt's responses of an earlier epoch, a
worker's own has the siblings that it samples itself, and vLLM's n-gram proposer has the request alone.

A simulated batch tells what drafts that are accepted so often would bring a preset: dora-64 those of counting, agent-64
those of tool loops.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dora.data.remembered import Remembered, scope_of
from dora.data.types import RequestSpec, SamplingParams
from dora.lab.sim.presets import scenario_for
from dora.lab.sim.run import simulate
from dora.models.checkpoint_names import to_checkpoint
from dora.models.tiny import make_tiny
from dora.models.tiny_vocabulary import EOS_ID
from dora.worker.drafting.drafter import Drafter
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine

BATCHES: Final = (1, 4, 16)
FULL: Final = 64  # slots of the engine
CONTEXT_TOKENS: Final = 256
HISTORY_BYTES: Final = 64 << 20
FIRST, LAST = 4, 60  # token ids that mean something
CALL: Final = (4, 5, 6, 7)
RETURN: Final = (8, 9, 10)
REMARKS: Final = ((11, 12), (13, 14, 15), (16,), (17, 18, 11))


def counting(chosen: random.Random) -> tuple[list[int], list[int]]:
    """Returns a prompt and a response: a number of two tokens, and those after it."""
    base, first = 20, chosen.randrange(0, 400)
    numbers = [(base + each // 20, base + each % 20) for each in range(first, first + 30)]
    response = [token_id for number in numbers[1:] for token_id in (*number, 11 + (number[1] % 3))]
    return [19, *numbers[0]], [*response, EOS_ID]


def tool_loop(chosen: random.Random) -> tuple[list[int], list[int]]:
    names = [[chosen.randrange(20, LAST) for _ in range(3)] for _ in range(5)]
    response: list[int] = []
    for name in names:
        response += [*CALL, *name, *RETURN, *chosen.choice(REMARKS)]
    return [18, *(token_id for name in names for token_id in name)], [*response, EOS_ID]


KINDS: Final = ("history", "fleet", "ngram")
TASKS: Final = {"counting": counting, "tool loops": tool_loop}


def trained(folder: Path, steps: int) -> Path:
    """Writes a tiny model that has learned the tasks."""
    made = make_tiny("dense", folder / "random", seed=1)
    model: Any = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    optimiser, chosen = torch.optim.AdamW(model.parameters(), 3e-3), random.Random(0)
    for step in range(steps):
        texts = [[*chain(*TASKS[name](chosen))] for name in TASKS for _ in range(16)]
        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        labels = torch.where(ids == 0, -100, ids)
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
    save_file(to_checkpoint(model.state_dict(), model.config.to_dict()), made / "model.safetensors")
    return made


def requests_of(name: str, prompts: int, group: int, epoch: int) -> list[RequestSpec]:
    chosen = random.Random(f"{name}")
    found = []
    for prompt in range(prompts):
        token_ids = tuple(TASKS[name](chosen)[0])
        for member in range(group):
            seed = 1000 * epoch + 100 * prompt + member
            sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=150)
            found.append(RequestSpec(f"{name}-{epoch}-{prompt}-{member}", 1, token_ids, sampling))
    return found


class Run:
    """Responses to some requests, at most ``batch`` at once, and their time."""

    def __init__(self, engine: VllmEngine, requests: Sequence[RequestSpec], batch: int) -> None:
        waiting, self.responses = list(reversed(requests)), {}
        running: set[str] = set()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        before = engine.load()
        while waiting or running:
            while waiting and len(running) < batch:
                request = waiting.pop()
                engine.add(request)
                running.add(request.request_id)
                self.responses[request.request_id] = []
            for delta in engine.step():
                self.responses[delta.request_id] += zip(delta.token_ids, delta.logprobs, strict=True)
                if delta.finish_reason is not None:
                    running.discard(delta.request_id)
        self.wall_s, self.cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        self.tokens = sum(map(len, self.responses.values()))
        accepted = engine.load().accepted_tokens - before.accepted_tokens
        self.tokens_per_step = self.tokens / (self.tokens - accepted)

    @property
    def token_ids(self) -> dict[str, list[int]]:
        return {name: [token_id for token_id, _ in each] for name, each in self.responses.items()}


def remembered(requests: Sequence[RequestSpec], responses: dict[str, list[int]]) -> list[Remembered]:
    """Returns responses as the service sends them."""
    return [
        Remembered(scope_of(each.prompt_token_ids), b"", (*each.prompt_token_ids[-32:], *responses[each.request_id]))
        for each in requests
    ]


def measured(engine: VllmEngine, name: str, batch: int, rounds: int) -> dict[str, float]:
    """Compares an engine with each kind of drafts with the runs without, before and after it; medians of the rounds."""
    group = max(1, batch // 2)
    prompts = max(2, (8 if batch == FULL else 2) * batch // group)  # large batches try both ways first
    earlier, requests = (requests_of(name, prompts, group, epoch) for epoch in (0, 1))
    known = remembered(earlier, Run(engine, earlier, batch).token_ids)

    def run_of(kind: str) -> Run:
        drafter = None if kind == "off" else Drafter(HISTORY_BYTES, is_shared=kind != "ngram")
        for response in known if drafter is not None and kind == "fleet" else ():
            drafter.remember(response)
        engine.core.scheduler.drafter = drafter
        if drafter is not None:  # the engine's cost is known after a few steps
            Run(engine, [replace(each, request_id=f"w{each.request_id}") for each in requests_of(name, 2, 1, 9)], 2)
        return Run(engine, requests, batch)

    plain, found = run_of("off"), defaultdict[str, list[float]](list)
    found["tokens_per_s"].append(plain.tokens / plain.cpu_s)
    for _ in range(rounds):
        for kind in KINDS:
            run, after = run_of(kind), run_of("off")
            if run.responses != plain.responses:
                raise SystemExit(f"FAILED: drafts ({kind}) changed a response")
            found[f"{kind}_vs_off"].append((plain.cpu_s + after.cpu_s) / 2 / run.cpu_s)
            found[f"{kind}_vs_off_by_clock"].append((plain.wall_s + after.wall_s) / 2 / run.wall_s)
            found[f"{kind}_tokens_per_step"].append(run.tokens_per_step)
            found["tokens_per_s"].append(after.tokens / after.cpu_s)
            plain = after
    engine.core.scheduler.drafter = None
    return {key: median(values) for key, values in found.items()}


def sources(responses: dict[str, list[int]], earlier: dict[str, list[int]], requests: Sequence[RequestSpec]) -> Any:
    """Returns the tokens a step of each source of drafts, for recorded responses. Siblings run at the same time, half
    of them on another worker.
    """
    here = [each for each in requests if int(each.request_id[-1]) % 2 == 0]
    of_now = {each.request_id: earlier[each.request_id.replace("-1-", "-0-", 1)] for each in requests}
    found = {}
    for kind in ("fleet", "own history", "own tokens"):
        drafter = Drafter(HISTORY_BYTES, is_shared=kind != "own tokens")
        if kind == "fleet":
            elsewhere = [each for each in requests if each not in here]
            for response in (*remembered(requests, of_now), *remembered(elsewhere, responses)):
                drafter.remember(response)
        found[kind] = _replayed(drafter, here, responses)
    found["vLLM's n-gram"] = sum(len(responses[each.request_id]) for each in here) / sum(
        _ngram_steps(each, responses[each.request_id]) for each in here
    )
    return found


def _replayed(drafter: Drafter, requests: Sequence[RequestSpec], responses: dict[str, list[int]]) -> float:
    steps = tokens = 0
    live = {each.request_id: 0 for each in requests}
    for each in requests:
        drafter.begin(each.request_id, each)
    while live:
        drafter.begin_step(len(live))
        drafts = drafter.drafts({name: len(responses[name]) - at - 1 for name, at in live.items()})
        for name, at in list(live.items()):
            whole, draft = responses[name], drafts.get(name, [])
            kept = next((i for i, token_id in enumerate(draft) if token_id != whole[at + i]), len(draft)) + 1
            drafter.sampled(name, whole[at : at + kept], len(draft))
            steps, tokens, live[name] = steps + 1, tokens + kept, at + kept
            if live[name] == len(whole):
                drafter.forget(name)
                del live[name]
    return tokens / steps


def _ngram_steps(request: RequestSpec, response: list[int], drafted: int = 8) -> int:
    import numpy as np
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as propose

    at = steps = 0
    while at < len(response):
        so_far = np.array([*request.prompt_token_ids, *response[:at]], dtype=np.int32)
        draft = propose(so_far, 2, 5, CONTEXT_TOKENS, drafted).tolist()
        rest = response[at:-1]
        pairs = zip(draft, rest, strict=False)
        kept = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(rest)))
        at, steps = at + kept + 1, steps + 1
    return steps


def simulated(name: str, tokens_per_step: float) -> dict[str, float | str]:
    """Returns the time of a batch of a preset, and of its last group, with as many tokens a step and without drafts.
    The policy is the one that waits for each batch.
    """
    plain, acceptance = scenario_for(name, "sync"), min(0.95, 1 - 1 / tokens_per_step)
    cost = plain.cluster.cost.model_copy(update={"draft_acceptance": acceptance})
    cluster = plain.cluster.model_copy(update={"cost": cost})
    found: dict[str, float | str] = {"preset": name, "acceptance": acceptance}
    for kind, scenario in (("off", plain), ("drafts", plain.model_copy(update={"cluster": cluster}))):
        report = simulate(scenario, steps=1, warmup=0, seed=0)
        found[f"step_min_{kind}"] = report.step_time_min
        found[f"last_group_min_{kind}"] = report.step_waited_min[0]
    found["last_group_vs_off"] = float(found["last_group_min_drafts"]) / float(found["last_group_min_off"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="of training (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="their medians count (%(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[*BATCHES, FULL])
    parser.add_argument(
        "--presets", nargs=2, default=("dora-64", "agent-64"), help="one for each task's drafts (%(default)s)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dora-speculation-") as folder:
        model = trained(Path(folder), options.steps)
        settings = EngineSettings(FULL, FULL * CONTEXT_TOKENS, CONTEXT_TOKENS, speculation="history")
        engine = VllmEngine(model, settings)
        engine.load_weights(1, model, None)
        for name in TASKS:
            batches = {str(batch): measured(engine, name, batch, options.rounds) for batch in options.batches}
            requests = [requests_of(name, 4, 8, epoch) for epoch in (0, 1)]
            earlier, now = (Run(engine, each, 32).token_ids for each in requests)
            compared = sources(now, earlier, requests[1])
            found[name] = {
                "batches": batches,
                "tokens_per_step": compared,
            }
        engine.close()
    for task, preset in zip(found.values(), options.presets, strict=True):
        task["simulated"] = simulated(preset, task["tokens_per_step"]["fleet"])
    if options.json:
        print(json.dumps(found))
        return
    for name, task in found.items():
        print(name)
        for batch, row in task["batches"].items():
            print(f"  batch {batch:>3}: " + ", ".join(f"{key} {value:,.2f}" for key, value in row.items()))
        print("  tokens a step: " + ", ".join(f"{key} {value:.2f}" for key, value in task["tokens_per_step"].items()))
        said = {key: f"{value:.2f}" if key != "preset" else value for key, value in task["simulated"].items()}
        print("  simulated: " + ", ".join(f"{key} {value}" for key, value in said.items()))


if __name__ == "__main__":
    main()
