"""The papers' tables as settings to be simulated, each with what is claimed of it; python -m experiments runs them.

The scenarios are the presets of experiments/presets.py, StaleFlow's with splits of their own. Splits, engine sizes and
windows are each system's, and training time follows from the split; nothing else differs between the systems of one
setting.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dora.config import WindowConfig
from dora.lab.sim.scenario import Scenario
from experiments import papers
from experiments.presets import NAMES, scenario_for


@dataclass(frozen=True)
class Claim:
    """A paper's number of one system. ``over``: what it is a ratio to; ``paper`` None: only a mean is stated."""

    quantity: str  # step_time_min, speedup (tokens a second) or rollout_speedup (time that nothing hides)
    system: str
    over: str = ""
    paper: float | None = None


@dataclass(frozen=True)
class Setting:
    """One row of a table: scenarios by the system that they stand for, and what is claimed of them."""

    preset: str
    systems: dict[str, Scenario]
    claims: tuple[Claim, ...]


Means = dict[tuple[str, str], float]  # by (family of systems, over; "": all): the paper's mean speed-up


def dora() -> Iterator[Setting]:
    for gpus in (64, 128):
        cells = [cell for cell in papers.DORA_STEPS if cell.gpus == gpus]
        name = f"dora-{gpus}"
        systems = {cell.policy: scenario_for(name, cell.policy) for cell in cells}
        yield Setting(
            name, systems, tuple(Claim("step_time_min", cell.policy, "", cell.step_time_min) for cell in cells)
        )


def longcat() -> Iterator[Setting]:
    for name, task in (("longcat-4096", "maths"), ("longcat-4096-agentic", "agentic")):
        systems = {policy: scenario_for(name, policy) for policy in ("sync", "dora", "laxity")}
        paper = papers.LONGCAT_ROLLOUT_SPEEDUP[task]
        claims = tuple(Claim("rollout_speedup", policy, "sync", paper) for policy in ("dora", "laxity"))
        yield Setting(name, systems, claims)


def laminar() -> Iterator[Setting]:
    return _laminar_settings([name for name in NAMES if name.startswith("laminar-") and not name.endswith("-tools")])


def tools() -> Iterator[Setting]:
    return _laminar_settings([name for name in NAMES if name.startswith("laminar-") and name.endswith("-tools")])


def _laminar_settings(chosen: Sequence[str]) -> Iterator[Setting]:
    baselines = [each.policy for each in papers.LAMINAR_SPEEDUPS]
    for name in chosen:
        systems = {policy: scenario_for(name, policy) for policy in ("laminar", *baselines)}
        yield Setting(name, systems, tuple(Claim("speedup", "laminar", baseline) for baseline in baselines))


# "We tune the GPU allocation ratio between rollout and training to optimal values" (StaleFlow, section 6.1), for every
# system: accelerators that generate, found by runs of 12 steps after 8, in whole engines (of staleflow-128 two at a
# time), until more and fewer were slower.
STALEFLOW_ROLLOUT_GPUS: Final = {  # by preset: of one_step; of staleflow and of partial, at bounds 1, 2 and 3
    "staleflow-128": (106, (99, 102, 100), (100, 101, 101)),
    "staleflow-14b-64": (32, (33, 33, 32), (35, 37, 38)),
    "staleflow-32b-128": (60, (68, 68, 64), (64, 68, 72)),
    "staleflow-32b-base-128": (88, (76, 68, 64), (68, 68, 68)),
}


def staleflow() -> Iterator[Setting]:
    for name, rollout_gpus in STALEFLOW_ROLLOUT_GPUS.items():
        yield _staleflow_setting(name, *rollout_gpus)
    name, step_min = "staleflow-128-40k", papers.STALEFLOW_40K_STEP_S / 60
    yield Setting(
        name, {"staleflow": scenario_for(name, "staleflow")}, (Claim("step_time_min", "staleflow", "", step_min),)
    )


def _staleflow_setting(name: str, one_step_gpus: int, own_gpus: Sequence[int], peer_gpus: Sequence[int]) -> Setting:
    """VeRL-Async bounds staleness by what is in flight, (bound + 1) batches (StaleFlow, 2.2): being generated, or
    generated and not yet trained on. Slots for as much spread it evenly."""
    systems = {"sync": scenario_for(name, "sync"), "one_step": split(scenario_for(name, "one_step"), one_step_gpus)}
    claims: list[Claim] = []
    for staleness, own, its in zip((1, 2, 3), own_gpus, peer_gpus, strict=True):
        ours, peer = f"staleflow, {staleness}", f"partial, {staleness}"
        systems[ours] = split(scenario_for(name, "staleflow", staleness + 1), own)
        partial = split(scenario_for(name, "partial"), its)
        in_flight = (staleness + 1) * partial.trainer.groups_per_step
        slots = -(-in_flight * partial.workload.group_size // partial.cluster.engines)
        cluster = partial.cluster.model_copy(update={"slots": slots})
        systems[peer] = partial.model_copy(update={"cluster": cluster, "in_flight_groups": in_flight})
        claims += [Claim("speedup", ours, over) for over in ("sync", "one_step", peer)]
    return Setting(name, systems, tuple(claims))


def split(scenario: Scenario, rollout_gpus: int) -> Scenario:
    """The scenario with so many accelerators for rollout; training scales linearly with the others."""
    cluster, trainer = scenario.cluster, scenario.trainer
    divided = cluster.model_copy(update={"rollout_gpus": rollout_gpus})
    step_s = trainer.step_s * cluster.train_gpus / divided.train_gpus
    return scenario.model_copy(update={"cluster": divided, "trainer": trainer.model_copy(update={"step_s": step_s})})


def under(scenario: Scenario, policy: str, window: int | None = None) -> Scenario:
    """The same cluster with another strategy, and perhaps another window."""
    balance = scenario.balance.model_copy(update={"policy": policy})
    size = scenario.window.size if window is None else window
    return scenario.model_copy(update={"balance": balance, "window": WindowConfig(size=size)})


def streamrl() -> Iterator[Setting]:
    """Table 3, each row with what the row above has: Algorithm 2 in place, then apart from the trainer, then ahead.

    The other models and lengths are compared in a figure: no number is stated of one of them.
    """
    for name in (name for name in NAMES if name.startswith("streamrl-")):
        colocated = scenario_for(name, "sync")
        systems = {
            "colocated": colocated,
            "skewness-aware scheduling": under(colocated, "streamrl"),
            "disaggregated, streaming": scenario_for(name, "streamrl", 1),
            "asynchronous": scenario_for(name, "streamrl"),
        }
        stated = papers.STREAMRL_ABLATION if name == "streamrl-128" else {}
        claims = (Claim("speedup", row, "colocated", stated.get(row)) for row in systems if row != "colocated")
        yield Setting(name, systems, tuple(claims))


def verl() -> Iterator[Setting]:
    """Its stream begins no batch ahead (staleness 0): sync, with accelerators of its own and a trainer that streams."""
    seen: set[papers.AsyncRow] = set()  # the ablations share a row
    for name, rows in papers.VERL_ROWS.items():
        own = [row for row in rows if row not in seen]
        seen |= set(own)
        systems = {row.policy: scenario_for(name, row.policy) for row in own}
        if "stream" in systems:
            systems["stream"] = under(systems["stream"], "sync", 1)
        claims = [Claim("step_time_min", row.policy, "", row.step_s / 60) for row in own]
        yield Setting(name, systems, tuple(claims))


def _means(family: str, speedups: Sequence[papers.Speedup]) -> Means:
    return {(family, each.policy): each.mean for each in speedups}


TABLES: Final[dict[str, tuple[Callable[[], Iterator[Setting]], Means]]] = {
    "dora": (dora, {}),
    "longcat": (longcat, {}),
    "laminar": (laminar, _means("laminar", papers.LAMINAR_SPEEDUPS)),
    "tools": (tools, {("laminar", ""): papers.LAMINAR_TOOLS_SPEEDUP.mean}),
    "staleflow": (staleflow, _means("staleflow", papers.STALEFLOW_SPEEDUPS)),
    "streamrl": (streamrl, {}),
    "verl": (verl, {}),
}
