"""Presets and the papers' numbers: what they say agrees with the papers' ratios and with each other."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, exp, prod
from pathlib import Path
from typing import get_args

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dora.config import merged, settings_tree, validated_as
from dora.errors import InvalidValue
from dora.planning.generation import bound_s
from dora.planning.hardware import find_hardware
from dora.planning.models import find_model
from dora.planning.options import Option, options
from dora.planning.pace import Batch
from dora.sim import papers
from dora.sim.experiments import EXPERIMENTS
from dora.sim.paper_results import paper_result
from dora.sim.papers import DORA_STEPS
from dora.sim.presets import composed, names, planned, preset, scenario_for
from dora.sim.scenario import Cluster, Scenario
from dora.sim.workload import moments

LAMINAR_TABLE_2 = [name for name in names() if name.startswith("laminar-") and not name.endswith("-tools")]


def bound_min(scenario: Scenario) -> float:
    """The bubble-free bound of a scenario in minutes."""
    cluster, responses = scenario.cluster, scenario.trainer.groups_per_step * scenario.workload.group_size
    lengths = moments(scenario.workload)
    tokens, context = lengths.generated_tokens(responses), lengths.context_tokens(responses)
    return bound_s(cluster.cost, cluster.slots, cluster.kv_tokens, tokens, context, cluster.engines) / 60


def test_every_row_of_the_papers_tables_has_a_preset() -> None:
    assert names()[:2] == ["dora-64", "dora-128"]
    assert len(LAMINAR_TABLE_2) == 15
    assert {f"laminar-7b-{gpus}-tools" for gpus in (16, 32, 64, 128, 256)} <= set(names())
    assert {"staleflow-128-40k", "staleflow-14b-64", "staleflow-32b-128", "staleflow-32b-base-128"} <= set(names())
    assert sum(name.startswith("streamrl-") for name in names()) == 9
    assert {"streamrl-7b-32-5k", "streamrl-32b-128-20k", "streamrl-72b-128-10k"} <= set(names())
    assert set(papers.VERL_ROWS) <= set(names())
    assert {f"verl-async-128-{row}" for row in ("stale-0.1", "stale-0.3", "batches-1", "batches-2")} <= set(names())
    assert {"verl-async-30b-128", "verl-async-32-tools"} <= set(names())
    assert {"laminar-7b-16", "laminar-32b-512", "laminar-72b-1024", "staleflow-128", "streamrl-128"} <= set(names())
    assert {"longcat-4096", "longcat-4096-agentic", "verl-async-32", "verl-async-64", "verl-async-128"} <= set(names())
    assert {"fleet-1024", "small"} <= set(names())


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("policy", ["dora", "laminar", "sync", "one_step", "stream", "partial"])
def test_every_preset_is_a_possible_cluster_under_every_policy(name: str, policy: str) -> None:
    scenario = scenario_for(name, policy)
    assert (scenario.name, scenario.policy) == (name, policy)
    assert scenario.cluster.engines >= 1
    assert (
        scenario.cluster.colocated
        or scenario.cluster.rollout_gpus + scenario.cluster.train_gpus == scenario.cluster.gpus
    )
    assert scenario.workload.lengths.cap_tokens < scenario.cluster.kv_tokens
    assert scenario.trainer.step_s > 0.0
    assert scenario.trainer.streams == (policy not in ("sync", "one_step") and not scenario.cluster.colocated)


@pytest.mark.parametrize(("name", "bound"), [("dora-64", 15.63), ("dora-128", 9.38)])
def test_the_dora_presets_have_the_bound_of_the_facts(name: str, bound: float) -> None:
    assert bound_min(preset(name)) == pytest.approx(bound, rel=0.02)


@pytest.mark.parametrize("cell", DORA_STEPS, ids=lambda cell: f"{cell.policy}-{cell.gpus}")
def test_training_times_are_those_of_the_stated_fractions(cell: papers.StepCell) -> None:
    if cell.training_min is not None:
        placement = EXPERIMENTS[f"dora-{cell.gpus}"].placement(cell.policy)
        assert placement.training_s / 60 == pytest.approx(cell.training_min, rel=0.005)


def test_training_scales_linearly_from_the_colocated_to_the_disaggregated() -> None:
    for gpus, train_gpus in ((64, 40), (128, 88)):
        sync, own = (EXPERIMENTS[f"dora-{gpus}"].placement(policy) for policy in ("sync", "dora"))
        assert sync.training_s * gpus == pytest.approx(own.training_s * train_gpus, rel=0.01)


def test_sync_uses_all_accelerators_for_both() -> None:
    assert [scenario_for(f"dora-{gpus}", "sync").cluster.engines for gpus in (64, 128)] == [16, 32]


def test_a_policy_gets_its_papers_row_and_engine_size() -> None:
    splits = {
        policy: scenario_for("laminar-7b-256", policy).cluster for policy in ("laminar", "partial", "stream", "sync")
    }
    assert {policy: (cluster.train_gpus, cluster.engines) for policy, cluster in splits.items()} == {
        "laminar": (192, 64),
        "partial": (128, 128),
        "stream": (40, 108),
        "sync": (256, 128),
    }


def test_training_efficiency_is_the_one_at_which_laminars_own_splits_match() -> None:
    """The geometric mean over its 15 rows of training time over bound is 1."""
    scenarios = [scenario_for(name, "laminar") for name in LAMINAR_TABLE_2]
    ratios = [scenario.trainer.step_s / 60 / bound_min(scenario) for scenario in scenarios]
    assert prod(ratios) ** (1 / len(ratios)) == pytest.approx(1.0, rel=0.05)


def test_areal_trains_on_the_layouts_of_its_paper_and_the_others_linearly() -> None:
    for name in LAMINAR_TABLE_2:
        cost = {  # of a step on one accelerator
            policy: scenario.trainer.step_s * scenario.cluster.train_gpus
            for policy in ("laminar", "stream", "partial")
            if (scenario := scenario_for(name, policy))
        }
        assert cost["laminar"] == pytest.approx(cost["stream"])
        assert cost["partial"] >= cost["laminar"] * (1 - 1e-9)
    assert cost["partial"] > 1.5 * cost["laminar"]  # 72B on 1,024: four stages, two micro-batches an update


def test_areals_trainer_stands_while_it_writes_its_weights_to_storage() -> None:
    """Files of 7.6, 8.2 and 9.1 GB, 10 at most, one a rank: 4 GB take 8 s and half of 10 (paper 001, section 4.1)."""
    for name, seconds in (("7b-16", 24.8), ("7b-256", 24.8), ("32b-32", 26.6), ("72b-1024", 29.5)):
        assert scenario_for(f"laminar-{name}", "partial").trainer.publish_s == pytest.approx(seconds, abs=0.05)
    stalls = [scenario_for("laminar-72b-64", policy).trainer.publish_s for policy in ("sync", "stream", "laminar")]
    assert stalls == [1.4, 1.4, 1.4]


def test_tool_calling_has_the_splits_of_table_2_and_at_most_eight_calls() -> None:
    maths, tools = (scenario_for(name, "laminar") for name in ("laminar-7b-256", "laminar-7b-256-tools"))
    assert tools.cluster == maths.cluster
    assert (maths.workload.turns.most, tools.workload.turns.most) == (1, 9)
    answers = moments(tools.workload).answer_tokens * 2  # over the whole response; half of them before a token of it
    assert tools.trainer.step_s / maths.trainer.step_s == pytest.approx(1 + answers / (2400 + 150))


@pytest.mark.parametrize("name", papers.VERL_ROWS)
def test_a_row_of_verls_tables_has_its_training_time_its_split_and_what_may_be_in_flight(name: str) -> None:
    for row in papers.VERL_ROWS[name]:
        scenario = scenario_for(name, row.policy)
        assert scenario.trainer.step_s == pytest.approx(row.step_s - row.generation_s)
        if row.policy == "partial":
            groups = scenario.trainer.groups_per_step
            assert scenario.in_flight_groups == round(groups * (1 + row.staleness))
            assert scenario.cluster.rollout_gpus == (row.rollout_gpus or row.gpus // 2)
        paper = paper_result(name, row.policy)
        assert paper is not None and paper.step_time_min == pytest.approx(row.step_s / 60)


def test_verls_trainer_takes_as_many_mini_batches_at_once_as_the_row_says() -> None:
    rows = ["batches-1", "batches-2", "batches-4", "stale-0.1"]
    fetches = [scenario_for(f"verl-async-128-{row}", "partial").trainer.micro_batches for row in rows]
    assert fetches == [16, 8, 4, 4]  # of 32, 64, 128 and 128 of 512 prompts


def test_streamrls_shorter_lengths_are_the_longest_ones_scaled_down() -> None:
    for size in ("7b-32", "32b-128", "72b-128"):
        longest = "streamrl-128" if size == "72b-128" else f"streamrl-{size}-20k"
        whole = preset(longest).workload.lengths
        for length, factor in (("10k", 2), ("5k", 4)):
            scaled = preset(f"streamrl-{size}-{length}").workload.lengths
            assert scaled.cap_tokens * factor == whole.cap_tokens
            assert (exp(scaled.mu) * factor, scaled.sigma) == pytest.approx((exp(whole.mu), whole.sigma), rel=1e-6)


@pytest.mark.parametrize("size", ["128-40k", "14b-64", "32b-128"])
def test_staleflows_splits_are_those_of_the_shortest_step(size: str) -> None:
    own, best = preset(f"staleflow-{size}"), planned(preset(f"staleflow-{size}"))
    assert abs(own.cluster.rollout_gpus - best.cluster.rollout_gpus) <= own.cluster.gpus_per_engine


def test_trainers_that_take_the_engines_logprobs_compute_six_passes_of_eight() -> None:
    for name in ("staleflow-128", "staleflow-14b-64"):
        one_step, *others = (scenario_for(name, each).trainer.step_s for each in ("one_step", "partial", "staleflow"))
        assert others == pytest.approx([0.75 * one_step] * 2)


def test_staleflows_base_model_has_the_lengths_that_dora_states_for_it() -> None:
    own, dora = preset("staleflow-32b-base-128").workload.lengths, preset("dora-64").workload.lengths
    assert (own.sigma, own.cap_tokens) == (dora.sigma, 20 * 1024)
    assert own.mu == pytest.approx(dora.mu, abs=0.01)


def test_staleflows_table_3_is_just_above_the_bound_of_its_preset() -> None:
    """Of the 460 s that it states for a step 413 are decoding; nothing decodes faster than the bound."""
    scenario = preset("staleflow-128-40k")
    paper = paper_result("staleflow-128-40k", "staleflow", scenario.window)
    assert paper is not None and paper.step_time_min == pytest.approx(460.1 / 60)
    assert 0.95 * 413.3 < 60 * max(bound_min(scenario), scenario.trainer.step_s / 60) < 413.3
    assert paper_result("staleflow-128-40k", "staleflow", scenario.window - 1) is None  # stated for that bound alone


@pytest.mark.parametrize("name", ["staleflow-128", "staleflow-128-40k"])
def test_staleflows_coefficients_are_those_of_its_table_4(name: str) -> None:
    """Fitted to an engine of this mixture of experts, they contain what its experts cost."""
    cost = preset(name).cluster.cost
    stated = (cost.kv_token_s, cost.weights_s, cost.request_s, cost.step_s)
    assert stated == (7.28e-8, 1.72e-3, 1.25e-4, 1.07e-2)
    assert (cost.expert_fraction, cost.imbalance, cost.shared_fraction) == (1.0, 0.0, 0.0)


def test_derived_mixtures_have_the_experts_of_their_model() -> None:
    found = {name: preset(name).cluster.cost for name in ("longcat-4096", "longcat-4096-agentic", "verl-async-30b-128")}
    assert [cost.expert_fraction for cost in found.values()] == [8 / 512, 8 / 512, 8 / 128]
    assert all(cost.imbalance > 0.0 and cost.shared_fraction > 0.0 for cost in found.values())
    mixtures = {
        name
        for name in names()
        if preset(name).cluster.cost.expert_fraction < 1.0 or preset(name).cluster.cost.imbalance
    }
    assert mixtures == set(found)


def test_a_parameter_of_a_distribution_that_is_not_in_use_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text('{"hist": {"100": 1, "200": 1}}')
    lengths = {"kind": "histogram", "file": str(file)}
    assert composed({"workload": {"lengths": lengths}}, "small").workload.lengths.kind == "histogram"
    with pytest.raises(InvalidValue, match=r"workload\.lengths\.sigma = 0\.5 .*only lognormal has it"):
        composed({"workload": {"lengths": {**lengths, "sigma": 0.5}}}, "small")


def test_policies_have_the_window_of_their_definition() -> None:
    assert [scenario_for("dora-64", policy).window for policy in ("sync", "one_step", "stream", "dora")] == [1, 2, 2, 3]
    assert scenario_for("dora-64", "dora", window=2).window == 2
    assert [scenario_for(name, "streamrl").window for name in ("dora-64", "streamrl-128")] == [2, 2]
    assert scenario_for("dora-64", "streamrl", window=1).window == 1
    with pytest.raises(InvalidValue, match=r"window = 3 .* 1, by the definition of sync"):
        scenario_for("dora-64", "sync", window=3)
    with pytest.raises(InvalidValue, match=r"window = 3 .* 1 to 2, by the definition of streamrl"):
        composed({"policy": "streamrl", "window": 3})


def test_laminar_checks_for_idle_replicas_as_often_as_its_paper() -> None:
    assert [scenario_for("dora-64", policy).period_s for policy in ("laminar", "dora")] == [5.0, 30.0]


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(InvalidValue, match="did you mean dora-64"):
        preset("dora64")


def test_fields_are_overridden_and_checked() -> None:
    over = settings_tree(None, ["workload.lengths.sigma=1.0", "cluster.load_s=5"])
    scenario = composed(over, "dora-64")
    assert (scenario.workload.lengths.sigma, scenario.workload.lengths.mu) == (1.0, 7.0881)
    assert (scenario.cluster.load_s, scenario.cluster.rollout_gpus) == (5.0, 24)
    for override, message in (
        ("workload.lengths.sigmma=1", "did you mean sigma"),
        ("cluster.cost.kv_token_s=-1", "a number from 0 to 10000"),
        ("cluster.cost.kv_token_s=nan", "finite"),
        ('cluster.cost.kv_token_s="1"', "a number from 0 to 10000"),
        ("cluster.gpus_per_engine=1", "at least 4, with 80 GB each: 65.5 GB of weights"),
        ("window=soon", "a whole number from 1 to 64"),
    ):
        with pytest.raises(InvalidValue, match=message):
            composed(settings_tree(None, [override]), "dora-64")


def numbers(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a section, and of those below it, that are numbers."""
    for name, each in section.model_fields.items():
        kinds = [each.annotation, *get_args(each.annotation)]
        for below in (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)):
            yield from numbers(below)
        if {int, float} & {kind for kind in kinds if isinstance(kind, type)}:
            yield f"{section.__name__}.{name}", each


def test_every_number_has_a_least_and_a_most() -> None:
    """Else it ends a run half way: out of memory, of the 64 bits of a column, or of what a float can hold."""
    found = dict(numbers(Scenario))
    assert len(found) >= 45
    bounds = {name: [isinstance(limit, kinds) for kinds in ((Ge, Gt), (Le, Lt)) for limit in each.metadata].count(True)
              for name, each in found.items()}  # fmt: skip
    assert [name for name, count in bounds.items() if count != 2] == []


def test_without_a_preset_the_default_cluster_is_changed() -> None:
    assert composed({"policy": "sync"}).window == 1
    found = composed({"window": 4}, policy="laminar").model_copy(update={"policy": "laxity", "window": 3})
    assert found == Scenario(cluster=Cluster(gpu_memory_bytes=80e9))


def test_sections_are_merged_field_by_field() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}}) == {
        "a": {"b": 1, "c": 4},
        "d": {"e": 5},
    }
    with pytest.raises(InvalidValue, match="one of name, policy"):
        validated_as(Scenario, {"nonsense": 1})


def test_the_plan_splits_for_the_shortest_step() -> None:
    own, plan = preset("dora-64"), planned(preset("dora-64"))
    assert plan.cluster.gpus == own.cluster.gpus
    assert plan.trainer.step_s == pytest.approx(own.trainer.step_s * own.cluster.train_gpus / plan.cluster.train_gpus)
    longest = max(bound_min(own), own.trainer.step_s / 60)
    assert max(bound_min(plan), plan.trainer.step_s / 60) < longest
    with pytest.raises(InvalidValue, match="colocated"):
        planned(scenario_for("dora-64", "sync"))


def test_a_trainer_fits_on_the_split_of_every_preset_and_on_the_planned_one() -> None:
    layouts: dict[tuple[str, str, int], list[Option]] = {}
    for name, experiment in EXPERIMENTS.items():
        own = preset(name)
        splits = {own.cluster.train_gpus, planned(own).cluster.train_gpus} if own.trainer.step_s else set()
        model = experiment.model or "qwen2.5-32b"
        hardware = experiment.hardware or "h800"
        longest = own.workload.lengths.cap_tokens + ceil(own.workload.prompt_tokens)
        found = layouts.setdefault((model, hardware, longest), [])
        if not found:
            batch = Batch(1e6, longest, 0.0)
            found += options(find_model(model), find_hardware(hardware), batch, context=1)
        for gpus in splits:
            assert any(option.fits(gpus) for option in found), (name, gpus)


def test_the_papers_ratios_hold_between_its_cells() -> None:
    """DORA section 5.2 states 1.56 and 1.93 by time, 1.65 and 2.12 by tokens, 8.2 and 5.9 by rollout time."""
    cells = {(cell.gpus, cell.policy): cell for cell in DORA_STEPS}
    for gpus, by_time, by_tokens, by_rollout in ((64, 1.56, 1.65, 8.2), (128, 1.93, 2.12, 5.9)):
        sync, dora = cells[gpus, "sync"], cells[gpus, "dora"]
        assert sync.step_time_min / dora.step_time_min == pytest.approx(by_time, abs=0.01)
        paper = paper_result(f"dora-{gpus}", "dora")
        assert paper is not None and paper.speedup is not None and paper.rollout_speedup is not None
        assert paper.speedup == pytest.approx(by_tokens, abs=0.01)
        assert paper.rollout_speedup == pytest.approx(by_rollout, rel=0.05)  # the fractions have two digits


def test_a_paper_is_silent_where_it_says_nothing() -> None:
    assert paper_result("dora-64", "staleflow") is None
    assert paper_result("small", "dora") is None
    derived = paper_result("laminar-32b-128", "one_step")
    assert derived is not None and derived.speedup == pytest.approx(2.56 / 1.98)
    verl = paper_result("verl-async-128", "partial")
    assert verl is not None and verl.speedup == pytest.approx(2.37, abs=0.01)
    rows = [("sync", 1), ("streamrl", 1), ("streamrl", 2), ("laxity", 2)]
    found = [paper_result("streamrl-128", policy, window) for policy, window in rows]
    assert [result and result.speedup for result in found] == [1.0, 1.23, 1.48, None]
    agentic = paper_result("longcat-4096-agentic", "dora")
    assert agentic is not None and agentic.rollout_speedup == 6.2


def test_where_a_paper_states_a_range_alone_it_is_a_note() -> None:
    for name, policy, window, words in (
        ("laminar-7b-64-tools", "laminar", 0, "2.62 times"),
        ("streamrl-7b-32-5k", "streamrl", 2, "1.3 to 2.66 times the throughput of verl"),
        ("streamrl-7b-32-5k", "streamrl", 1, "1.06 to 1.41 times the throughput of ColocationRL"),
    ):
        found = paper_result(name, policy, window)
        assert found is not None and found.speedup is None and words in found.note
    assert paper_result("laminar-7b-64-tools", "stream") is None


def test_laminars_table_has_all_its_rows() -> None:
    rows = papers.LAMINAR_SPLITS
    assert {policy: len(each) for policy, each in rows.items()} == dict.fromkeys(rows, 15)
    largest = {policy: each[-1] for policy, each in rows.items()}
    assert largest["laminar"] == papers.SplitRow("72b", 1024, 768, 256)
    assert largest["one_step"] == largest["stream"] == replace(largest["laminar"], train_gpus=256, rollout_gpus=768)


@pytest.mark.parametrize("field", ["window", "period_s", "filter_fraction"])
def test_a_truth_value_is_no_number_of_a_scenario(field: str) -> None:
    with pytest.raises(InvalidValue, match=f"{field} = True is not valid: it must be a (whole )?number"):
        composed({field: True}, "small")


def test_without_a_preset_the_cluster_has_to_hold_its_model_too() -> None:
    with pytest.raises(InvalidValue, match=r"cluster.gpus_per_engine = 4 .*at least 12503, with 80 GB each"):
        composed({"cluster": {"weights_bytes": 1e15}})
    assert composed({"cluster": {"weights_bytes": 1e15, "gpu_memory_bytes": 0.0}}).cluster.engines
