"""The papers' numbers, and the rows made of them: they agree with the papers' ratios and with each other."""

from dataclasses import replace
from math import ceil, exp, prod

import pytest

from dora.data.hardware import find_hardware
from dora.lab.planning.models import find_model
from dora.lab.planning.options import Option, options
from dora.lab.planning.pace import Batch
from dora.lab.sim.extent import expected_bound_s
from dora.lab.sim.presets import composed, planned
from dora.lab.sim.run import simulate
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.workload import moments
from experiments import papers
from experiments.papers import DORA_STEPS
from experiments.presets import EXPERIMENTS, NAMES, file_of, preset, scenario_for

LAMINAR_TABLE_2 = [name for name in NAMES if name.startswith("laminar-") and not name.endswith("-tools")]


def bound_min(scenario: Scenario) -> float:
    """The bubble-free bound of a scenario in minutes."""
    return expected_bound_s(scenario) / 60


def test_every_row_of_the_papers_tables_has_a_preset() -> None:
    assert len(LAMINAR_TABLE_2) == 15
    assert {f"laminar-7b-{gpus}-tools" for gpus in (16, 32, 64, 128, 256)} <= set(NAMES)
    assert {"staleflow-128-40k", "staleflow-14b-64", "staleflow-32b-128", "staleflow-32b-base-128"} <= set(NAMES)
    assert sum(name.startswith("streamrl-") for name in NAMES) == 9
    assert {"streamrl-7b-32-5k", "streamrl-32b-128-20k", "streamrl-72b-128-10k"} <= set(NAMES)
    assert set(papers.VERL_ROWS) <= set(NAMES)
    assert {f"verl-async-128-{row}" for row in ("stale-0.1", "stale-0.3", "batches-1", "batches-2")} <= set(NAMES)
    assert {"verl-async-30b-128", "verl-async-32-tools"} <= set(NAMES)
    assert {"laminar-7b-16", "laminar-32b-512", "laminar-72b-1024", "staleflow-128", "streamrl-128"} <= set(NAMES)
    assert {"longcat-4096", "longcat-4096-agentic", "verl-async-32", "verl-async-64", "verl-async-128"} <= set(NAMES)
    assert {"fleet-1024", "small"} <= set(NAMES)


@pytest.mark.parametrize("cell", DORA_STEPS, ids=lambda cell: f"{cell.policy}-{cell.gpus}")
def test_training_times_are_those_of_the_stated_fractions(cell: papers.StepCell) -> None:
    if cell.training_min is not None:
        step_s = scenario_for(f"dora-{cell.gpus}", cell.policy).trainer.step_s
        assert step_s / 60 == pytest.approx(cell.training_min, rel=0.005)


def test_training_scales_linearly_from_the_colocated_to_the_disaggregated() -> None:
    for gpus, train_gpus in ((64, 40), (128, 88)):
        sync, own = (scenario_for(f"dora-{gpus}", policy).trainer.step_s for policy in ("sync", "dora"))
        assert sync * gpus == pytest.approx(own * train_gpus, rel=0.01)


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
    """Files of 7.6, 8.2 and 9.1 GB, 10 at most, one a rank: 4 GB take 8 s and half of 10 (Laminar, section 4.1)."""
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
    """The paper states 460 s a step, 413 of them for decoding; nothing decodes faster than the bound."""
    scenario = preset("staleflow-128-40k")
    assert pytest.approx(460.1) == papers.STALEFLOW_40K_STEP_S
    assert 0.95 * 413.3 < 60 * max(bound_min(scenario), scenario.trainer.step_s / 60) < 413.3


@pytest.mark.parametrize("name", ["staleflow-128", "staleflow-128-40k"])
def test_staleflows_coefficients_are_those_of_its_table_4(name: str) -> None:
    """Fitted to an engine of this mixture of experts, they contain what its experts cost."""
    cost = preset(name).cluster.cost
    stated = (cost.kv_token_s, cost.weights_s, cost.request_s, cost.step_s)
    assert stated == (7.28e-8, 1.72e-3, 1.25e-4, 1.07e-2)
    assert (cost.expert_fraction, cost.imbalance, cost.shared_fraction) == (1.0, 0.0, 0.0)


def test_derived_mixtures_have_the_experts_of_their_model() -> None:
    names = ("longcat-4096", "longcat-4096-agentic", "verl-async-30b-128", "hybrid-64")
    found = {name: preset(name).cluster.cost for name in names}
    assert [cost.expert_fraction for cost in found.values()] == [8 / 512, 8 / 512, 8 / 128, 10 / 512]
    assert all(cost.imbalance > 0.0 and cost.shared_fraction > 0.0 for cost in found.values())
    mixtures = {
        name for name in NAMES if preset(name).cluster.cost.expert_fraction < 1.0 or preset(name).cluster.cost.imbalance
    }
    assert mixtures == set(found)


def test_a_trainer_fits_on_the_split_of_every_preset_and_on_the_planned_one() -> None:
    layouts: dict[tuple[str, str, int], list[Option]] = {}
    for name, experiment in EXPERIMENTS.items():
        own = preset(name)
        splits = {own.cluster.train_gpus, planned(own).cluster.train_gpus} if own.trainer.step_s else set()
        model, hardware = experiment.model, experiment.hardware
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
        assert sync.tokens_per_s and dora.tokens_per_s and sync.rollout_only_fraction and dora.rollout_only_fraction
        assert dora.tokens_per_s / sync.tokens_per_s == pytest.approx(by_tokens, abs=0.01)
        rollout_min = [each.step_time_min * each.rollout_only_fraction for each in (sync, dora)]
        assert rollout_min[0] / rollout_min[1] == pytest.approx(by_rollout, rel=0.05)  # the fractions have two digits


def test_laminars_table_has_all_its_rows() -> None:
    rows = papers.LAMINAR_SPLITS
    assert {policy: len(each) for policy, each in rows.items()} == dict.fromkeys(rows, 15)
    largest = {policy: each[-1] for policy, each in rows.items()}
    assert largest["laminar"] == papers.SplitRow("72b", 1024, 768, 256)
    assert largest["one_step"] == largest["stream"] == replace(largest["laminar"], train_gpus=256, rollout_gpus=768)


@pytest.mark.full  # a step of 128 accelerators
def test_a_split_that_the_longest_response_limits_takes_about_as_long_as_planned() -> None:
    scenario = planned(scenario_for("verl-async-128", "laxity", 2))
    training_min = scenario.trainer.step_s / 60  # generation was planned to take as long
    report = simulate(scenario, steps=6, warmup=4, seed=0)
    assert report.bound_min < 0.3 * training_min  # it is not work that limits
    assert report.step_time_min == pytest.approx(training_min, rel=0.1)


@pytest.mark.parametrize("name", ["small", "laminar-7b-64", "longcat-4096-agentic"])
@pytest.mark.parametrize("policy", ["sync", "laxity"])
def test_a_row_is_a_file_for_the_simulator(name: str, policy: str) -> None:
    row = scenario_for(name, policy)
    from_file = composed(file_of(row), policy=policy)
    colocated = {"rollout_gpus": row.cluster.rollout_gpus} if row.cluster.colocated else {}
    assert from_file.model_copy(update={"cluster": from_file.cluster.model_copy(update=colocated)}) == row
