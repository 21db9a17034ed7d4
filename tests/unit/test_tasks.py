"""Workloads of several tasks: shares, lengths, prompts and turns of each, and a predictor that tells them apart."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.config import settings_tree
from dora.data.validation import validated_as
from dora.errors import InvalidValue
from dora.lab.sim.presets import composed, planned
from dora.lab.sim.run import check_cluster, expected_bound_s, simulate
from dora.lab.sim.scenario import Lengths, Scenario, SimTask, SimTurns, Workload
from dora.lab.sim.tasks import mixed_tokens, shapes_of
from dora.lab.sim.workload import EngineTurn, SimPrompt, WorkloadStream, moments
from tests.refusals import refused

MATHS, CODE, CHAT = (SimTask(name=name, share=share) for name, share in (("maths", 0.5), ("code", 0.3), ("chat", 0.2)))
MIX = (MATHS, CODE, CHAT)


def drawn(workload: Workload, count: int, seed: int = 0) -> list[SimPrompt]:
    return WorkloadStream(workload, seed, 512).take(count)


def by_task(prompts: list[SimPrompt]) -> dict[str, list[SimPrompt]]:
    tasks: dict[str, list[SimPrompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task_id, []).append(prompt)
    return tasks


# ---------------------------------------------------------------------------------------------------------------- draws


def test_without_tasks_a_workload_is_what_it_was_before_there_were_any() -> None:
    """The numbers are those of the code that knew one task only: nothing was added to what the seed draws."""
    workload = Workload(prompts=700, turns=SimTurns(most=3, environment_mean_s=2.0))
    first, second = drawn(workload, 702)[700:]
    assert (first.prompt_id, first.task_id, first.prompt_tokens) == ("p616.e1", "synthetic", 145)
    assert (second.prompt_id, second.task_id, second.prompt_tokens) == ("p196.e1", "synthetic", 55)
    assert (first.lengths[:3], second.lengths[:3]) == ((1274, 24033, 1410), (288, 341, 130))
    assert (first.features[0], second.features[0]) == pytest.approx((1.1000399274428063, 0.04682697632801436))
    assert first.turns[0][0] == EngineTurn(471, pytest.approx(0.40112775985927956), 0)


def test_tasks_that_have_nothing_of_their_own_change_names_alone() -> None:
    workload = Workload(prompts=600, turns=SimTurns(most=3, environment_mean_s=2.0))
    plain, named = drawn(workload, 600), drawn(workload.model_copy(update={"tasks": (MATHS, CODE, CHAT)}), 600)
    for one, other in zip(plain, named, strict=True):
        assert (one.key, one.prompt_tokens, one.features, one.lengths) == (
            other.key,
            other.prompt_tokens,
            other.features,
            other.lengths,
        )
    alone = drawn(workload.model_copy(update={"tasks": (SimTask(name="synthetic", share=1.0),)}), 600)
    assert alone == plain


@pytest.mark.parametrize(
    ("shares", "prompts", "counts"),
    [
        ((0.5, 0.3, 0.2), 1000, (500, 300, 200)),
        ((1 / 3, 1 / 3, 1 / 3), 100, (34, 33, 33)),
        ((0.7, 0.2, 0.1), 10, (7, 2, 1)),
        ((0.25, 0.375, 0.375), 10, (2, 4, 4)),
        ((0.98, 0.01, 0.01), 100, (98, 1, 1)),
    ],
)
def test_an_epoch_has_as_many_prompts_of_each_task_as_its_share_says(
    shares: tuple[float, ...], prompts: int, counts: tuple[int, ...]
) -> None:
    tasks = tuple(SimTask(name=str(index), share=share) for index, share in enumerate(shares))
    stream = WorkloadStream(Workload(prompts=prompts, tasks=tasks), 0, 512)
    epochs = [stream.take(prompts) for _ in range(2)]
    for epoch in epochs:
        assert Counter(prompt.task_id for prompt in epoch) == {str(index): n for index, n in enumerate(counts)}
    first, second = ({prompt.key: prompt.task_id for prompt in epoch} for epoch in epochs)
    assert first == second, "a prompt keeps its task"
    assert [prompt.task_id for prompt in epochs[0]] != sorted(prompt.task_id for prompt in epochs[0])


def test_each_task_has_its_own_scale_spread_and_prompts() -> None:
    lengths = Lengths(mu=12.0, sigma=1.2, scale=2.0, cap_tokens=10**9)
    tasks = (
        MATHS,
        CODE.model_copy(update={"scale": 0.1, "prompt_tokens": 600}),
        CHAT.model_copy(update={"sigma": 0.5}),
    )
    found = by_task(drawn(Workload(prompts=20_000, lengths=lengths, tasks=tasks), 20_000))
    for name, scale, sigma, prompt_tokens in (("maths", 2, 1.2, 150), ("code", 0.2, 1.2, 600), ("chat", 2, 0.5, 150)):
        logs = np.log([prompt.lengths for prompt in found[name]])
        assert logs.mean() == pytest.approx(12 + math.log(scale), abs=0.05)
        assert logs.std() == pytest.approx(sigma, rel=0.03)
        assert np.mean([prompt.prompt_tokens for prompt in found[name]]) == pytest.approx(prompt_tokens, rel=0.03)


def test_each_task_has_its_own_turns() -> None:
    tasks = (MATHS, CODE.model_copy(update={"turns": SimTurns(most=4, environment_mean_s=3.0, answer_tokens=70)}), CHAT)
    found = by_task(drawn(Workload(prompts=2000, tasks=tasks, turns=SimTurns(most=2, answer_tokens=5)), 2000))
    for name, most, answer_tokens, environment_s in (("maths", 2, 5, 0.0), ("code", 4, 70, 3.0), ("chat", 2, 5, 0.0)):
        responses = [
            (n, parts) for prompt in found[name] for n, parts in zip(prompt.lengths, prompt.turns, strict=True)
        ]
        assert all(sum(part.tokens for part in parts) == length for length, parts in responses)
        calls = [part for _, parts in responses for part in parts[:-1]]
        assert max(len(parts) for _, parts in responses) == most
        assert {call.answer_tokens for call in calls} == {answer_tokens}
        assert np.mean([call.environment_s for call in calls]) == pytest.approx(environment_s, rel=0.1)


def test_a_task_of_one_turn_beside_one_of_many_has_none_to_split() -> None:
    tasks = (MATHS, CODE.model_copy(update={"turns": SimTurns(most=4)}), CHAT)
    found = by_task(drawn(Workload(prompts=200, tasks=tasks), 200))
    assert {len(prompt.turns) for prompt in found["maths"]} == {0} and {len(p.turns) for p in found["code"]} == {16}


def test_each_task_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    files = []
    for tokens in (100, 7000):
        files.append(tmp_path / f"{tokens}.json")
        files[-1].write_text(json.dumps({"hist": {str(tokens): 1}}))
    tasks = (MATHS, CODE.model_copy(update={"file": str(files[1]), "scale": 2.0}), CHAT)
    lengths = {"kind": "histogram", "file": str(files[0])}
    found = by_task(drawn(Workload(prompts=100, lengths=Lengths(**lengths), tasks=tasks), 100))
    assert {name: {n for prompt in prompts for n in prompt.lengths} for name, prompts in found.items()} == {
        "maths": {100}, "code": {14_000}, "chat": {100},
    }  # fmt: skip
    with refused(InvalidValue, field="workload.lengths.file", value=""):
        drawn(Workload(prompts=100, lengths=Lengths(kind="histogram"), tasks=tasks), 1)
    missing = CODE.model_copy(update={"file": "no-such.json"})
    with refused(InvalidValue, field="workload.tasks.1.file", value="no-such.json"):
        drawn(Workload(prompts=100, lengths=Lengths(**lengths), tasks=(MATHS, missing, CHAT)), 1)


# -------------------------------------------------------------------------------------------------- bound, KV and split

# Every response of 1,000 tokens, or of 100: lengths without spread.
CERTAIN = Workload(
    lengths=Lengths(mu=math.log(1000), sigma=0.0),
    tasks=(
        SimTask(name="long", share=0.25, turns=SimTurns(most=5, answer_tokens=100), prompt_tokens=400),
        SimTask(name="short", share=0.75, scale=0.1, prompt_tokens=100),
    ),
)


def test_moments_are_those_of_all_tasks_and_weigh_prompts_and_answers_by_the_tokens_after_them() -> None:
    found = moments(CERTAIN)
    assert found.mean_tokens == pytest.approx(0.25 * 1000 + 0.75 * 100)
    assert found.mean_square_tokens == pytest.approx(0.25 * 1e6 + 0.75 * 1e4)
    # 250 of 325 sampled tokens are after long ones' prompts, and after half of 1 .. 5 turns less one, a hundred each
    assert found.prompt_tokens == pytest.approx((250 * 400 + 75 * 100) / 325, rel=2e-3)
    assert found.answer_tokens == pytest.approx(250 * 100 / 325)


def test_the_bound_is_that_of_the_work_that_is_drawn() -> None:
    prompts = drawn(CERTAIN.model_copy(update={"prompts": 4000}), 4000)
    responses = 4000 * 16
    assert sum(sum(p.lengths) for p in prompts) == pytest.approx(moments(CERTAIN).generated_tokens(responses))
    work = sum(prompt.context_work() for prompt in prompts)
    assert work == pytest.approx(moments(CERTAIN).context_tokens(responses), rel=0.01)
    scenario = composed({}, "dora-64")
    longer = scenario.model_copy(update={"workload": Workload(tasks=(SimTask(name="x", share=1.0, scale=1.1),))})
    assert expected_bound_s(longer) > 1.05 * expected_bound_s(scenario)


def test_the_mixture_has_each_task_in_its_place() -> None:
    scores = np.array([-6.0, 0.0, 0.67, 0.68, 6.0])  # three quarters lie below 0.674
    assert mixed_tokens(shapes_of(CERTAIN))(scores) == pytest.approx([100, 100, 100, 1000, 1000])
    spread = Workload(tasks=(SimTask(name="a", share=0.5, scale=3.0), SimTask(name="b", share=0.5)))
    prompts = drawn(spread.model_copy(update={"prompts": 40_000}), 40_000)
    shares = np.array([0.1, 0.5, 0.9, 0.99])
    of_mixture = mixed_tokens(shapes_of(spread))(np.array([-1.2816, 0.0, 1.2816, 2.3263]))
    seen = np.quantile([n for prompt in prompts for n in prompt.lengths], shares)
    assert seen == pytest.approx(np.minimum(of_mixture, 30_000), rel=0.03)


def test_a_split_is_planned_for_all_tasks_together() -> None:
    def engines(scale: float, window: int) -> int:
        tasks = [{"name": "a", "share": 0.5, "scale": scale}, {"name": "b", "share": 0.5}]
        return planned(composed({"workload": {"tasks": tasks}}, "dora-64", "laxity", window)).cluster.engines

    for window in (1, 3):
        assert engines(0.1, window) < engines(3.0, window)


def test_the_kv_holds_the_longest_prompt_and_answers_of_any_task() -> None:
    tasks = [
        {"name": "a", "share": 0.5, "prompt_tokens": 20},
        {"name": "b", "share": 0.5, "prompt_tokens": 1, "turns": {"most": 4, "answer_tokens": 500}},
    ]
    workload = {"lengths": {"cap_tokens": 1000}, "tasks": tasks}
    least = 1000 + 48 + 3 * 500  # 1 token on average is 16 to 48; 20 are 964 at most, and bring no answers
    check_cluster(composed({"cluster": {"kv_tokens": least}, "workload": workload}, "small"))
    with refused(InvalidValue, field="cluster.kv_tokens", value=2547, names=(least,)):
        check_cluster(composed({"cluster": {"kv_tokens": least - 1}, "workload": workload}, "small"))


# -------------------------------------------------------------------------------------------------------------- refused


def refusal(workload: dict[str, Any]) -> str:
    with pytest.raises(InvalidValue) as refused:
        validated_as(Scenario, {"workload": workload})
    return str(refused.value)


A, B = {"name": "a", "share": 0.5}, {"name": "b", "share": 0.5}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"share": 0.4}, "share = 0.4 is not valid: it must be such that the shares of all 2 are 1 together, not 0.9"),
        ({"share": 0.0}, "share = 0.0 is not valid: it must be a number above 0 and at most 1"),
        ({"share": 1.5}, "share = 1.5 is not valid: it must be a number above 0 and at most 1"),
        ({"share": math.nan}, "share = nan is not valid: it must be a finite number above 0 and at most 1"),
        ({"share": "half"}, "share = 'half' is not valid: it must be a number above 0 and at most 1"),
        ({"name": ""}, "name = '' is not valid: it must be a non-empty text"),
        ({"name": "a"}, "name = 'a' is not valid: it must be a name that no task before it has"),
        ({"scael": 2}, "scael = 2 is not valid: did you mean scale? One of name, share, scale"),
        ({"scale": 0}, "scale = 0 is not valid: it must be a number from 1e-06 to 1000000"),
        ({"sigma": True}, "sigma = True is not valid: it must be a number from 0 to 20"),
        ({"prompt_tokens": 2049}, "prompt_tokens = 2049 is not valid: it must be a whole number from 1 to 2048"),
        ({"turns": {"most": 0}}, "turns.most = 0 is not valid: it must be a whole number from 1 to 4096"),
        (
            {"turns": {"most": 4000}},
            "turns.most = 4000 is not valid: it must be at most 2048 with workload.group_size = 16",
        ),
        ({"turns": 3}, "turns = 3 is not valid: it must be a section with most, environment_mean_s"),
        (
            {"file": "x.json"},
            "file = 'x.json' is not valid: it must be left out: lengths.kind is lognormal, and only histogram",
        ),
    ],
)
def test_what_no_task_can_have_is_refused_with_field_value_and_what_is_allowed(
    second: dict[str, Any], message: str
) -> None:
    assert refusal({"tasks": [A, B | second]}).startswith(f"workload.tasks.1.{message}")


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (
            {"tasks": [A]},
            ".0.share = 0.5 is not valid: it must be such that the shares of all 1 are 1 together, not 0.5",
        ),
        ({"tasks": [A, {"share": 0.5}]}, ".1.name is missing: it must be a text"),
        ({"tasks": [A, {"name": "b"}]}, ".1.share is missing: it must be a number above 0"),
        ({"tasks": [A, 3]}, ".1 = 3 is not valid: it must be a section with name, share, scale"),
        (
            {"tasks": A},
            " = {'name': 'a', 'share': 0.5} is not valid: it must be a list of sections with name, share, scale",
        ),
        ({"tasks": "maths"}, " = 'maths' is not valid: it must be a list of sections with name, share, scale"),
        (
            {"tasks": [{"name": str(index), "share": 1 / 257} for index in range(257)]},
            " = '257 tasks' is not valid: it must be at most 256",
        ),
        (
            {"prompts": 9, "tasks": [{**A, "share": 0.9}, {**B, "share": 0.1}]},
            ".1.share = 0.1 is not valid: it must be at least 0.111111: it has one of the 9 workload.prompts, or more",
        ),
        (
            {"lengths": {"kind": "histogram", "file": "x.json"}, "tasks": [A, {**B, "sigma": 1.0}]},
            ".1.sigma = 1.0 is not valid: it must be left out: lengths.kind is histogram, and only lognormal has it",
        ),
    ],
)
def test_tasks_that_do_not_go_together_are_refused(workload: dict[str, Any], message: str) -> None:
    assert refusal(workload).startswith(f"workload.tasks{message}")


def test_256_tasks_of_as_many_prompts_can_be_drawn() -> None:
    tasks = tuple(SimTask(name=str(index), share=1 / 256) for index in range(256))
    assert len(by_task(drawn(Workload(prompts=256, tasks=tasks), 256))) == 256


FILE = """
[workload]
prompts = 17_000

[[workload.tasks]]
name = "maths"
share = 0.3
scale = 2.0

[[workload.tasks]]
name = "code"
share = 0.3
prompt_tokens = 400

[[workload.tasks]]
name = "chat"
share = 0.4
scale = 0.2
sigma = 0.8
"""


def test_a_file_has_them_as_a_list_of_sections_and_a_setting_changes_one_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(FILE)
    tasks = composed(settings_tree(file, ["workload.tasks.2.scale=0.5"]), "small").workload.tasks
    assert [(task.name, task.share, task.scale) for task in tasks] == [
        ("maths", 0.3, 2.0), ("code", 0.3, 1.0), ("chat", 0.4, 0.5),
    ]  # fmt: skip
    whole = composed(settings_tree(None, ['workload.tasks=[{name="a",share=0.5},{name="b",share=0.5}]']), "small")
    assert [task.name for task in whole.workload.tasks] == ["a", "b"]
    replaced = settings_tree(file, ['workload.tasks.0={name="logic",share=0.3}'])
    assert composed(replaced, "small").workload.tasks[0] == SimTask(name="logic", share=0.3)
    for setting in ("workload.tasks.3.scale=2", "workload.tasks.x.scale=2", "workload.tasks.-1.scale=2"):
        with refused(InvalidValue, field="--set", names=("3",)):
            settings_tree(file, [setting])
    with refused(InvalidValue, field="workload.tasks.0.scale", value=2):
        composed(settings_tree(None, ["workload.tasks.0.scale=2"]), "small")


# ------------------------------------------------------------------------------------------------------------ simulated


@pytest.mark.parametrize(
    ("seed", "steps"), [(0, 4), *(pytest.param(each, 12, marks=pytest.mark.full) for each in (0, 1))]
)
def test_statistics_tell_tasks_apart_among_prompts_never_seen(tmp_path: Path, seed: int, steps: int) -> None:
    """In the first epoch the task is all that they can go by: with one task they know no prompt from another."""
    file = tmp_path / "mine.toml"
    file.write_text(FILE)
    common = {"balance": {"predictor": "statistics"}, "trainer": {"groups_per_step": 64}}
    several = composed({**common, **settings_tree(file, [])}, "small")
    one = composed({**common, "workload": {"prompts": 17_000}}, "small")
    told, blind = (simulate(scenario, steps=steps, warmup=1, seed=seed) for scenario in (several, one))
    assert told.recall_longest_20 > 0.35
    assert blind.recall_longest_20 == pytest.approx(0.2, abs=0.05)
    assert (told.violations, told.lost, told.duplicated) == (0, 0, 0)
