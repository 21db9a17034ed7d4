"""The report of a learning run as one HTML page, which loads nothing else. Every text of the run is escaped."""

import html
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean as mean
from typing import Any, Final

from dora.data.mismatch import RATIO_HIGH, RATIO_LOW
from dora.errors import InvalidValue
from dora.ops.view import curves
from dora.ops.view.learning import Learning, SampledResponse, StepFacts

SHOWN_STEPS_MAX: Final = 12  # whose samples are shown, evenly over the run
_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:720px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}svg{width:100%;font-size:11px;fill:#555}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.25em .6em;text-align:left}
td.n{text-align:right}pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f6f6f6;padding:.6em;margin:.3em 0}
"""

Text = Callable[[Sequence[int]], str]  # token ids as text


def facts(run: Learning, hourly: float) -> dict[str, Any]:
    """Returns the figures of ``dora report --json``. ``hourly`` is the price of an hour, 0 if unknown."""
    hours, same = run.seconds / 3600, [each for each in run.mismatches if not each.staleness]
    cost = round(hourly * hours, 4) if hourly else None
    return {
        "steps": len(run.steps),
        "responses": sum(each.responses for each in run.steps),
        "tokens": run.tokens,
        "seconds": round(run.seconds, 3),
        "waited_s": round(run.waited_s, 3),
        "staleness_mean": run.staleness_mean,
        "groups_replayed": sum(each.groups_replayed for each in run.steps),
        "tokens_drafted": run.drafts[0],
        "tokens_accepted": run.drafts[1],
        "reward_first": run.quarter(last=False),
        "reward_last": run.quarter(last=True),
        "best_version": run.best and run.best["version"],
        "best_reward": run.best and run.best["reward_mean"],
        "cost": cost,
        "cost_per_million_tokens": round(cost / run.tokens * 1e6, 4) if cost and run.tokens else None,
        "by_step": [_step(each) for each in run.steps],
        "evaluations": run.evaluations,
        "mismatch_kl": mean([each.kl for each in same]) if same else None,
        "ratio_outside": mean([each.ratio_outside for each in same]) if same else None,
        "mismatches": [asdict(each) for each in run.mismatches],
    }


def page(run: Learning, name: str, hourly: float, text: Text) -> str:
    """The page. ``text`` decodes the samples' token ids."""
    found = facts(run, hourly)
    title = f"{name}: {len(run.steps)} steps"
    parts = [f"<h1>{html.escape(title)}</h1>", _summary(found), *_plots(run), "<h2>Samples</h2>"]
    every = max(1, -(-len(run.steps) // SHOWN_STEPS_MAX))
    for each in run.steps[::every]:
        parts += [_sample(each.step, sample, text) for sample in each.samples.values()]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def text_of(record: Path) -> Text:
    """Decodes with the tokenizer of the record's version 0; without one, shows token ids."""
    from dora.prompts.tokenizer import ChatTokenizer

    try:
        return ChatTokenizer(record / "versions" / "0").decode
    except InvalidValue:
        return lambda token_ids: " ".join(map(str, token_ids))


def _step(each: StepFacts) -> dict[str, Any]:
    return {
        "step": each.step,
        "reward_mean": each.reward_mean,
        "responses": each.responses,
        "tokens": each.tokens,
        "seconds": each.seconds,
        "waited_s": each.waited_s,
        "staleness_groups": each.staleness_groups,
        "groups_replayed": each.groups_replayed,
        "drafts": each.drafts,
    }


def _summary(found: dict[str, Any]) -> str:
    shown = {
        "responses": f"{found['responses']:,}",
        "tokens": f"{found['tokens']:,}",
        "from the first commit to the last": f"{found['seconds']:,.1f} s",
        "of it, the trainer waited": f"{found['waited_s']:,.1f} s",
        "mean staleness of a group": _number(found["staleness_mean"]),
        "mean reward, first quarter of the steps": _number(found["reward_first"]),
        "mean reward, last quarter": _number(found["reward_last"]),
    }
    if found["mismatch_kl"] is not None:
        outside = f"{found['ratio_outside']:.1%} of ratios outside {RATIO_LOW} to {RATIO_HIGH}"
        shown["mismatch of engines and trainer, mean over versions"] = (
            f"KL {_number(found['mismatch_kl'])} nats a token, {outside}"
        )
    if found["groups_replayed"]:
        shown["groups trained on once more"] = f"{found['groups_replayed']:,}"
    if found["tokens_drafted"]:
        share = found["tokens_accepted"] / found["tokens_drafted"]
        shown["drafted tokens that were accepted"] = f"{found['tokens_accepted']:,} ({share:.0%})"
    if found["best_version"] is not None:
        shown["best evaluation"] = f"{_number(found['best_reward'])}, version {found['best_version']}"
    if found["cost"] is not None:
        per_million = f", {_number(found['cost_per_million_tokens'])} for a million tokens" if found["tokens"] else ""
        shown["cost"] = f"{found['cost']:,.2f}{per_million}"
    rows = (
        f"<tr><th>{html.escape(key)}</th><td class=n>{html.escape(value)}</td></tr>" for key, value in shown.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _plots(run: Learning) -> list[str]:
    rewards = [(float(each.step), each.reward_mean) for each in run.steps if each.reward_mean is not None]
    evaluated = [
        (float(each["version"]), float(each["reward_mean"]))
        for each in run.evaluations
        if each["reward_mean"] is not None
    ]
    series: list[tuple[str, curves.Points]] = [("training", rewards)]
    times = [
        (float(each.step), (min(each.waited_s or 0.0, each.seconds), max(0.0, each.seconds - (each.waited_s or 0.0))))
        for each in run.steps
        if each.seconds is not None
    ]
    oldest = max((len(each.staleness_groups) for each in run.steps), default=1)
    ages = [
        (float(each.step), [*map(float, each.staleness_groups), *[0.0] * (oldest - len(each.staleness_groups))])
        for each in run.steps
    ]
    apart = [(float(each.version), each.kl) for each in reversed(run.mismatches) if not each.staleness]
    mismatch = ["<h2>Mismatch, nats a token</h2>", curves.lines([("KL", apart)], "version")] if apart else []
    return [
        "<h2>Reward</h2>",
        curves.lines([*series, ("evaluation", evaluated)] if evaluated else series, "step"),
        "<h2>Seconds of a step</h2>",
        curves.bars(["waiting for groups", "training, commit"], times, "step"),
        "<h2>Groups by staleness</h2>",
        curves.bars([f"staleness {age}" for age in range(oldest)], ages, "step"),
        *mismatch,
    ]


def _sample(step: int, sample: SampledResponse, text: Text) -> str:
    name = f"step {step}, {sample.kind}: reward {_number(sample.reward)}, version {sample.version}"
    cut = " (beginning)" if sample.length_tokens > len(sample.response_token_ids) else ""
    log = f"<pre>{html.escape(sample.verifier_log)}</pre>" if sample.verifier_log else ""
    return (
        f"<details><summary>{html.escape(name)}, {sample.length_tokens:,} tokens</summary>"
        f"<pre>{html.escape(text(sample.prompt_token_ids))}</pre>"
        f"<pre>{html.escape(text(sample.response_token_ids))}{cut}</pre>{log}</details>"
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
