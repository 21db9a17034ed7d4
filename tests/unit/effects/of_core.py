"""The settings that the core reads: the window, re-balancing, selection, and its time limits."""

from functools import cache
from typing import Any, Final

from dora.config import Config
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.forecast.adaptive import AdaptiveSize, StepSignals
from dora.errors import DoraError
from dora.lab.sim.figures.meter import Meter
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.world import World
from tests.unit.effects.rows import Place, Row, Seen
from tests.unit.test_machine import Bench

COST: Final = {"kv_token_s": 3e-6, "weights_s": 6e-3, "request_s": 5e-4, "step_s": 2e-2, "prefill_token_s": 4e-5}
STEPS: Final = 5


def simulated(config: Config, _: Place) -> int:
    return decisions(config.model_dump_json())


def slowly_trained(config: Config, _: Place) -> int:
    return decisions(config.model_dump_json(), 60.0)


@cache
def decisions(settings: str, step_s: float = 3.0) -> int:
    """A digest of all commands that the core gives in some steps of a small simulated cluster with a pool."""
    config = Config.model_validate_json(settings)
    scenario = Scenario.model_validate(
        {
            "window": config.window.model_dump(),
            "balance": config.balance.model_dump(),
            "redundant_fraction": config.selection.redundant_fraction,
            "cluster": {
                "gpus": 8,
                "rollout_gpus": 6,
                "gpus_per_engine": 2,
                "slots": 8,
                "kv_tokens": 3000,
                "gpu_memory_bytes": 0,
                "pool_tokens": 6000,
                "cost": COST,
                "load_s": 0.5,
            },
            "trainer": {"groups_per_step": 8, "step_s": step_s, "micro_batches": 4},
            "workload": {
                "group_size": 4,
                "prompt_tokens": 100,
                "lengths": {"mu": 5.0, "sigma": 1.2, "cap_tokens": 1500},
            },
        }
    )
    world = World(scenario, 0)
    meter = Meter(world, 0, None)
    given: list[Any] = []
    world.observers.append(lambda now_s, _, commands: given.append((now_s, commands)))
    world.run_until(lambda: meter.steps >= STEPS, world.now_s + 10_000)
    return hash(repr(given))


def sizes(config: Config, _: Place) -> list[int]:
    """The sizes of an adaptive window whose trainer waits less the wider it is, and clips more."""
    window = AdaptiveSize(config.window)
    found = []
    for step in range(160):
        found.append(window.size)
        size = window.size
        took_s = 1.0 / (1.0 - (0.5, 0.31, 0.19, 0.12, 0.06, 0.05)[size - 1])  # of which it trains for one
        signals = StepSignals(took_s, took_s - 1.0, 0.045 * size, 1.0 - 0.09 * size, movement=0.001, staleness=size - 1)
        window.saw(step, signals)
    return found


def bench(config: Config) -> Bench:
    made = Bench()
    made.machine = Machine(config)
    made.state = made.machine.state
    return made


def staleness_bound(config: Config, _: Place) -> int:
    """The groups that are admitted before the trainer takes the first one: those of all versions of the window."""
    one = bench(config)
    one.start("w0", "w1")
    one.offer(32)
    return len(one.state.group_row)


def batch(config: Config, _: Place) -> object:
    """The answer to a trainer whose steps take two groups."""
    one = bench(config)
    try:
        one.start("w0")
    except DoraError as error:
        return error.__class__.__name__, getattr(error, "field", "")
    return one.state.window.groups_per_step


def open_session(config: Config) -> Bench:
    """A worker runs the first turn of a session; the clock is in whole seconds."""
    one = bench(config)
    one.start("w0")
    one.post(on.PromptsOffered((on.OfferedPrompt("s0", "task", 5, 1, 60, sessions=True),)))
    one.obey(do.StartRequest)
    return one


def silent(config: Config, _: Place) -> tuple[int, str]:
    """The seconds after which a session without a next turn is over, to within ten, and what happens then."""
    one = open_session(config)
    one.report("g0.0", 7, end=True)
    for ten in range(1000):
        one.now_s += 10.0
        for command in one.post(on.Tick()):
            if isinstance(command, do.ReplaceRequest | do.BreakOffSession):
                return 10 * (ten + 1), type(command).__name__
    return 0, ""


def replacements(config: Config, _: Place) -> int:
    """The number of times that a session is replaced whose environment fails each time."""
    one, name = open_session(config), "g0.0"
    for attempt in range(1, 100):
        one.report(name, 7, end=True)
        one.post(on.SessionFailed(name, "it died"))
        name = f"g0.0~{attempt}"
        if one.given(do.BreakOffSession):
            break
    return len(one.given(do.ReplaceRequest))


AUTO: Final = {"window.size": "auto"}
ORACLE: Final = {"balance.policy": "dora", "balance.predictor": "oracle"}
LAXITY: Final = {"balance.policy": "laxity", "balance.predictor": "oracle"}
WITH_COST: Final = {f"balance.cost.{name}": value for name, value in COST.items()}


def cost(value: float, base: Any = ORACLE, **more: float) -> Seen:
    return Seen(value, simulated, base={**base, **WITH_COST, **{f"balance.cost.{name}": n for name, n in more.items()}})


ROWS: Final[dict[str, Row]] = {
    "window.size": Seen(3, staleness_bound, 6),
    "window.groups_per_step": Seen(5, batch, ("Conflict", "groups_per_step")),
    "window.freshness": Seen(0.3, slowly_trained, base=LAXITY),
    "window.min": Seen(2, sizes, base=AUTO),
    "window.max": Seen(3, sizes, base=AUTO),
    "window.wait_share": Seen(0.2, sizes, base=AUTO),
    "window.clip_fraction_max": Seen(0.1, sizes, base=AUTO),
    "window.effective_sample_min": Seen(0.8, sizes, base=AUTO),
    "window.staleness_cost": Seen(20.0, sizes, base=AUTO),
    "window.look_steps": Seen(9, sizes, base=AUTO),
    "window.rest_steps": Seen(8, sizes, base=AUTO),
    "balance.policy": Seen("dora", simulated, base={"balance.predictor": "oracle"}),
    "balance.predictor": Seen("oracle", simulated),
    "balance.cost": Seen({**COST, "weights_s": 1.0}, simulated, base=ORACLE),
    "balance.cost.kv_token_s": cost(1e-4, LAXITY),
    "balance.cost.weights_s": cost(1.0),
    "balance.cost.request_s": cost(0.2),
    "balance.cost.step_s": cost(1.0),
    "balance.cost.prefill_token_s": cost(1e-6),
    "balance.cost.copy_token_s": cost(0.1),
    "balance.cost.state_s": cost(0.1),
    "balance.cost.copy_state_s": cost(1e3),
    "balance.cost.expert_fraction": cost(0.01, weights_s=1.0),
    "balance.cost.imbalance": cost(50.0),
    "balance.cost.shared_fraction": cost(0.9, weights_s=1.0, expert_fraction=0.01),
    "balance.cost.draft_acceptance": cost(0.9, kv_token_s=1e-4),
    "balance.cost.draft_verify_s": cost(0.5, kv_token_s=1e-4, draft_acceptance=0.9),
    "balance.period_s": Seen(1.0, simulated, base=ORACLE),
    "balance.pressure": Seen(0.5, simulated, base=ORACLE),
    "balance.moves_at_once": Seen(1, simulated, base=ORACLE),
    "balance.dora.hysteresis": Seen(0.0, simulated, base={"balance.policy": "dora", "balance.period_s": 1.0}),
    "balance.dora.level_gap": Seen(8, simulated, base=ORACLE),
    "sessions.idle_timeout_s": Seen(40.0, silent, (40, "ReplaceRequest")),
    "sessions.total_timeout_s": Seen(70.0, silent, (70, "ReplaceRequest"), base={"sessions.idle_timeout_s": 0.0}),
    "sessions.on_timeout": Seen("end", silent, (600, "BreakOffSession")),
    "sessions.replacements": Seen(5, replacements, 5),
    "selection.redundant_fraction": Seen(0.25, simulated, base=ORACLE),
}
