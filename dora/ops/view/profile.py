"""The results of ``dora profile``, as a table and as one tree."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from rich.text import Text

from dora.config import CostConfig
from dora.core.forecast.cost import CostModel
from dora.data.engine_samples import DecodeSample, DraftSample, Experts, Measurement, PrefillSample
from dora.lab.planning.profile import Fit, Validation
from dora.ops.view.tables import Facts


@dataclass(frozen=True, slots=True)
class ProfileReport:
    model: Annotated[str, "the timed model"]
    cost: Annotated[CostConfig, "seconds of a step, like a scenario's `cluster.cost`"]
    decode_error: Annotated[float, "mean relative error over the decode steps of the fit"]
    prefill_error: Annotated[float, "mean relative error over the prefill steps of the fit"]
    kink_requests: Annotated[float, "requests above which a step is compute-bound; 0: always"]
    measured_tokens_per_s: Annotated[float, "throughput on a mixed workload outside the fit, from the steps that count"]
    predicted_tokens_per_s: Annotated[float, "predicted throughput of the same workload"]
    predicted_over_measured: Annotated[float, "ratio of the two"]
    wall_tokens_per_s: Annotated[float, "throughput by the clock, including other load of the machine"]
    predicted_over_wall: Annotated[float, "ratio of the prediction to that"]
    wall_over_measured: Annotated[float, "time by the clock over that of the steps that count: at most 1.05 if quiet"]
    held: Annotated[tuple[str, ...], "ratios that must be near 1: `measured`, and `wall` if the machine was quiet"]
    mixed_wall_s: Annotated[tuple[float, ...], "time of each run of the mixed workload, by the clock"]
    slots: Annotated[int, "concurrent requests of the engine"]
    engines: Annotated[int, "engines timed at the same time"]
    clock: Annotated[str, "`wall`: the clock; `cpu`: the engine's CPU time"]
    experts: Annotated[Experts | None, "fit of a mixture of experts; null for a dense model"]
    dense_error: Annotated[float | None, "decode error of a dense fit to a mixture of experts; null for a dense model"]
    wall_s: Annotated[float, "the whole measurement"]
    decode: Annotated[tuple[DecodeSample, ...], "decode steps of the fit"]
    drafts: Annotated[tuple[DraftSample, ...], "steps that verified drafts"]
    prefill: Annotated[tuple[PrefillSample, ...], "prefill steps of the fit"]
    passed: Annotated[bool, "whether the ratios in `held` are within `--tolerance` of 1"]


def profile_tree(
    model: str, measurement: Measurement, fitted: Fit, checked: Validation, tolerance: float
) -> dict[str, Any]:
    report = ProfileReport(
        model=model,
        cost=fitted.coefficients,
        decode_error=fitted.decode_error,
        prefill_error=fitted.prefill_error,
        kink_requests=fitted.kink,
        measured_tokens_per_s=checked.tokens / checked.measured_s,
        predicted_tokens_per_s=checked.tokens / checked.predicted_s,
        predicted_over_measured=checked.ratio,
        wall_tokens_per_s=checked.tokens / checked.wall_s,
        predicted_over_wall=checked.wall_ratio,
        wall_over_measured=checked.slowdown,
        held=tuple(checked.held),
        mixed_wall_s=measurement.mixed_wall_s,
        slots=measurement.slots,
        engines=measurement.engines,
        clock=measurement.clock,
        experts=measurement.experts,
        dense_error=fitted.dense_error,
        wall_s=measurement.wall_s,
        decode=measurement.decode,
        prefill=measurement.prefill,
        drafts=measurement.drafts,
        passed=checked.passed(tolerance),
    )
    return asdict(report) | {"cost": fitted.coefficients.model_dump()}


def profile_table(model: str, measurement: Measurement, fitted: Fit, checked: Validation, tolerance: float) -> Facts:
    """The coefficients, then their check against a mixed workload."""
    beside = f", {measurement.engines} engines at once" if measurement.engines > 1 else ""
    title = f"cost of {model}, {measurement.slots} slots{beside}"
    table = Facts(title)
    cost = fitted.coefficients
    table.add_row("k1, a cached token", f"{cost.kv_token_s * 1e6:.4g} us")
    weights = f"{cost.weights_s * 1e3:.4g} ms, up to {fitted.kink:g} requests" if cost.weights_s else "not seen"
    table.add_row("k2, the weights", weights)
    table.add_row("k3, a request", f"{cost.request_s * 1e6:.4g} us")
    table.add_row("k4, the rest", f"{cost.step_s * 1e3:.4g} ms")
    if measurement.experts is not None:
        dense = CostModel.of(cost).dense
        bent = f"{cost.expert_fraction:.3g} of k2 for one token, imbalance {cost.imbalance:.3g}"
        table.add_row("experts", "no effect measured" if dense else f"{bent}; without, {fitted.dense_error:.1%} off")
    table.add_row("prefill", f"{1 / cost.prefill_token_s:,.0f} tokens/s" if cost.prefill_token_s else "free")
    if measurement.drafts:
        table.add_row("verifying drafts", f"{cost.draft_verify_s * 1e3:.4g} ms a step, beside k3 for each token")
    table.add_row("mean error", f"decode {fitted.decode_error:.1%}, prefill {fitted.prefill_error:.1%}")
    table.add_section()
    _add_check(table, measurement, checked, tolerance)
    return table


def _add_check(table: Facts, measurement: Measurement, checked: Validation, tolerance: float) -> None:
    fastest = measurement.engines == 1 and measurement.clock == "wall"
    counted = "from the fastest steps" if fastest else "from the typical steps"
    counted += ", in CPU time" if measurement.clock == "cpu" else ""
    table.add_row("predicted", f"{checked.tokens / checked.predicted_s:,.1f} tokens/s")
    held = checked.held
    for what, seconds, ratio, how in (
        ("measured", checked.measured_s, checked.ratio, counted),
        ("wall", checked.wall_s, checked.wall_ratio, f"by the clock, {checked.slowdown:.2f} times as long"),
    ):
        good = abs(ratio - 1.0) <= tolerance
        style = ("bold green" if good else "bold red") if what in held else "dim"
        table.add_row(what, f"{checked.tokens / seconds:,.1f} tokens/s {how}")
        table.add_row(f"predicted/{what}", Text(f"{ratio:.3f}" + ("" if what in held else ", not held"), style))
