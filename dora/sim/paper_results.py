"""Which of the papers' numbers stands beside a run: by preset and policy."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dora.sim import papers


@dataclass(frozen=True, slots=True)
class PaperResult:
    """What a paper says of one policy in one preset. ``None``: it does not say."""

    source: str
    step_time_min: float | None = None
    rollout_only_fraction: float | None = None
    tokens_per_s: float | None = None
    speedup: float | None = None  # throughput over sync
    rollout_speedup: float | None = None  # rollout-only time of sync over this one's
    note: str = ""
    overhead_balancing: float | None = None  # shares of the total time
    overhead_transfer: float | None = None


def paper_result(preset: str, policy: str, window: int = 0) -> PaperResult | None:
    """The paper's number beside which a run of ``preset`` under ``policy`` is shown; None where there is none.

    ``window``: of the run, where a paper has rows for several of one strategy; 0: the preset's.
    """
    family, _, rest = preset.partition("-")
    found: Iterator[PaperResult]
    if family == "dora":
        found = (_dora(cell) for cell in papers.DORA_STEPS if (str(cell.gpus), cell.policy) == (rest, policy))
    elif family == "verl":
        rows = papers.VERL_ROWS.get(preset, ())
        found = (_verl(row, rows) for row in rows if row.policy == policy)
    elif family == "laminar" and rest.endswith("tools"):
        found = _laminar_tools(policy)
    elif family == "laminar":
        found = _mean_speedups("laminar", policy, papers.LAMINAR_SPEEDUPS, papers.LAMINAR)
    elif preset == "staleflow-128-40k":
        found = _staleflow_40k(policy, window)
    elif family == "staleflow":
        found = _mean_speedups("staleflow", policy, papers.STALEFLOW_SPEEDUPS, papers.STALEFLOW)
    elif family == "streamrl":
        found = _streamrl(policy, window) if rest == "128" else _streamrl_range(policy, window)
    elif family == "longcat":
        found = _longcat(policy, "agentic" if rest.endswith("agentic") else "maths")
    else:
        found = iter(())
    return next(found, None)


def _dora(cell: papers.StepCell) -> PaperResult:
    sync = next(each for each in papers.DORA_STEPS if (each.gpus, each.policy) == (cell.gpus, "sync"))
    assert sync.tokens_per_s is not None and sync.rollout_only_fraction is not None
    rollout = None
    if cell.rollout_only_fraction is not None:
        rollout = sync.step_time_min * sync.rollout_only_fraction / (cell.step_time_min * cell.rollout_only_fraction)
    speedup = None if cell.tokens_per_s is None else cell.tokens_per_s / sync.tokens_per_s
    overhead = papers.DORA_OVERHEAD.get(f"dora-{cell.gpus}") if cell.policy == "dora" else None
    return PaperResult(
        papers.DORA,
        cell.step_time_min,
        cell.rollout_only_fraction,
        cell.tokens_per_s,
        speedup,
        rollout,
        cell.note,
        overhead_balancing=None if overhead is None else overhead.balancing,
        overhead_transfer=None if overhead is None else overhead.transfer,
    )


def _verl(row: papers.AsyncRow, rows: Iterable[papers.AsyncRow]) -> PaperResult:
    sync = next(each for each in rows if each.policy == "sync")
    return PaperResult(
        papers.VERL_ASYNC,
        row.step_s / 60,
        row.generation_s / row.step_s,
        speedup=sync.step_s / row.step_s,
        note="response lengths changed while it trained, differently in each run",
    )


def _laminar_tools(policy: str) -> Iterator[PaperResult]:
    """One mean over all baselines, and the range of the single ones."""
    if policy == "laminar":
        stated, least = papers.LAMINAR_TOOLS_SPEEDUP, papers.LAMINAR_TOOLS_LEAST
        note = (
            f"over all four baselines {stated.mean:g} times their throughput on average, {least:g} to {stated.most:g}"
        )
        yield PaperResult(papers.LAMINAR, note=note)
    elif policy == "sync":
        yield PaperResult(papers.LAMINAR, speedup=1.0)


def _staleflow_40k(policy: str, window: int) -> Iterator[PaperResult]:
    if policy == "staleflow" and window in (0, 4):
        note = "table 3; the lengths assumed here have this step's bound"
        yield PaperResult(papers.STALEFLOW, papers.STALEFLOW_40K_STEP_S / 60, note=note)


def _mean_speedups(
    system: str, policy: str, speedups: tuple[papers.Speedup, ...], source: str
) -> Iterator[PaperResult]:
    """Only means over all settings are given: over sync, and of the others by the ratio of two means."""
    over = {each.policy: each for each in speedups}
    if policy == system:
        sync = over["sync"]
        yield PaperResult(source, speedup=sync.mean, note=f"mean over its settings, at most {sync.most:g}")
    elif policy == "sync":
        yield PaperResult(source, speedup=1.0)
    elif policy in over:
        ratio = over["sync"].mean / over[policy].mean
        yield PaperResult(source, speedup=ratio, note="derived: ratio of two means over its settings")


def _streamrl(policy: str, window: int) -> Iterator[PaperResult]:
    rows = {"sync": "colocated", "streamrl": _streamrl_variant(window)}
    if policy in rows:
        speedup = papers.STREAMRL_ABLATION[rows[policy]]
        yield PaperResult(papers.STREAMRL, speedup=speedup, note=f"table 3, {rows[policy]}")


def _streamrl_range(policy: str, window: int) -> Iterator[PaperResult]:
    """Of single settings figure 8 shows bars without numbers; the text has the range."""
    if policy == "streamrl":
        over, least, most = papers.STREAMRL_RANGES[_streamrl_variant(window)]
        note = f"{least:g} to {most:g} times the throughput of {over}, over its nine settings"
        yield PaperResult(papers.STREAMRL, note=note)
    elif policy == "sync":
        yield PaperResult(papers.STREAMRL, speedup=1.0)


def _streamrl_variant(window: int) -> str:
    return "disaggregated, streaming" if window == 1 else "asynchronous"


def _longcat(policy: str, task: str) -> Iterator[PaperResult]:
    if policy == "dora":
        yield PaperResult(papers.DORA, rollout_speedup=papers.LONGCAT_ROLLOUT_SPEEDUP[task], note=f"{task}, figure 10")
    elif policy == "sync":
        yield PaperResult(papers.DORA, speedup=1.0, rollout_speedup=1.0)
