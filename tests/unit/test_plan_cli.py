"""``dora plan``: its tables, its JSON, what it refuses."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from dora.ops.cli.exits import DoraGroup
from dora.ops.cli.offline.plan import plan
from tests.sweeps import tenth_of

TWO_BUDGETS = ("--rollout-gpus", "8", "--train-gpus", "8")


def command() -> typer.Typer:
    app = typer.Typer(cls=DoraGroup)
    app.command("plan")(plan)
    app.callback()(lambda: None)
    return app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command(), ["plan", *arguments])


def test_it_prints_a_table_around_the_best() -> None:
    result = run("--gpus", "64")
    assert result.exit_code == 0
    (best,) = (line.split() for line in result.stdout.splitlines() if line.startswith("best"))
    assert " ".join(best) == "best 28 = 7 x 4 36 = 2x3x6 r 0 13.98 14.05* 14.05 train 63.2"
    assert result.stdout.count(" x 4 ") == 8


def test_it_says_how_the_best_trainer_is_laid_out() -> None:
    words = " ".join(run("--gpus", "64").stdout.split())
    assert "tensor 2, pipeline 3, data 6 parallel, micro-batches of 30,120 tokens, activations recomputed" in words
    assert "63.2 of 71.0 GB an accelerator" in words
    assert "r: activations recomputed" in words
    experts = " ".join(run("--gpus", "128", "--model", "qwen3-30b-a3b", "--hardware", "h20").stdout.split())
    assert "data 24, expert 8 parallel" in experts
    assert "e8: 8 ranks share the experts" in experts
    assert "c2:" not in experts
    long = ("--model", "qwen2.5-7b", "--cap-tokens", "500000", "--mean-tokens", "9000", "--gpus", "64")
    assert "c2: 2 ranks share a sequence" in " ".join(run(*long).stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpus", "64"),
        ("--rollout-gpus", "64", "--train-gpus", "64", "--link-gbps", "80", "--window", "1"),
        pytest.param(
            ("--gpus", "65536", "--model", "longcat-flash", "--hardware", "npu-60gb", "--cap-tokens", "64000"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_no_line_is_longer_than_100_characters(arguments: tuple[str, ...]) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(command(), ["plan", *arguments])
    assert result.exit_code == 0
    assert max(len(line.rstrip()) for line in result.stdout.splitlines()) <= 100


def test_it_prints_one_json_object() -> None:
    points = ("--train-s-at", "88=477", "--train-s-at", "40=774")
    result = run("--gpus", "128", *points, "--lengths", "lognormal:7.0881,1.2,30000", "--json")
    found = json.loads(result.stdout)
    assert (found["rollout_gpus"], found["train_gpus"], found["engines"], found["gpus_per_engine"]) == (48, 80, 12, 4)
    assert found["train_s_at"] == [[40, 774.0], [88, 477.0]]
    assert found["step_s"] == max(found["generation_s"], found["training_s"])
    layout = found["layout"]
    assert layout["tensor"] * layout["pipeline"] * layout["context"] * layout["data"] == 80
    assert layout["memory_bytes"] <= found["train_memory_bytes"] == pytest.approx(71e9)
    assert all(row["layout"]["memory_bytes"] <= 71e9 for row in found["candidates"])
    assert {key: found[key] for key in ("rollout_gpus", "train_gpus")} in [
        {key: row[key] for key in ("rollout_gpus", "train_gpus")} for row in found["candidates"]
    ]


@pytest.mark.parametrize(("window", "versions"), [("1", 3), ("2", 4), ("3", 5)])
def test_it_says_what_the_versions_take_of_a_hosts_memory(window: str, versions: int) -> None:
    arguments = ("--gpus", "64", "--model", "qwen2.5-32b", "--hardware", "h800", "--window", window)
    found = json.loads(run(*arguments, "--json").stdout)
    assert found["host_versions"] == versions
    assert found["host_weights_bytes"] == versions * found["weights_bytes"]
    assert f"{versions} versions of 65.5 GB in memory: {versions * 65.528:.1f}"[:-3] in run(*arguments).stdout


def test_it_plans_two_datacentres() -> None:
    result = run("--model", "qwen2.5-7b", "--rollout-gpus", "32", "--train-gpus", "96", "--rollout-hardware", "h20",
                 "--link-gbps", "80", "--json")  # fmt: skip
    found = json.loads(result.stdout)
    assert (found["rollout_hardware"], found["train_hardware"]) == ("h20", "h800")
    assert found["rollout_gpus"] <= 32
    assert found["train_gpus"] < 96
    assert found["transfer_s"] == pytest.approx(1.52, abs=0.01)


def test_the_trainers_accelerators_are_named_with_measured_times_too() -> None:
    measured = ("--rollout-gpus", "32", "--train-gpus", "64", "--train-s-at", "32=1200")
    for hardware, gigabytes in (("h800", 71.0), ("h20", 86.2)):
        result = run(*measured, "--hardware", hardware, "--rollout-hardware", "h20")
        assert result.exit_code == 0
        assert f"of {gigabytes} GB an accelerator" in " ".join(result.stdout.split())
        assert ("training on h800" in result.stdout) == (hardware == "h800")


@pytest.mark.parametrize("hardware", tenth_of(["a100-80gb", "h100", "h200", "b200", "mi300x"]))
def test_it_plans_any_configuration_on_each_accelerator(hardware: str, tmp_path: Path) -> None:
    """Tied and with grouped queries (Qwen2.5-1.5B), and a mixture with latent attention and shared experts."""
    dense = {"model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12}
    dense |= {"num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151_936, "tie_word_embeddings": True}
    mixture = {"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16}
    mixture |= {"num_key_value_heads": 16, "intermediate_size": 10_944, "moe_intermediate_size": 1408}
    mixture |= {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
    mixture |= {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    mixture |= {"v_head_dim": 128, "vocab_size": 102_400, "tie_word_embeddings": False}
    for tree, name, billions, kv_bytes in (
        (dense, "a-folder-with-quite-a-long-name-of-the-kind-that-models-have", 1.54, 28 * 2 * 2 * 128 * 2),
        (mixture, "lite", 15.7, 27 * 576 * 2),
    ):
        file = tmp_path / name / "config.json"
        file.parent.mkdir()
        file.write_text(json.dumps(tree))
        found = json.loads(run("--gpus", "64", "--model", str(file.parent), "--hardware", hardware, "--json").stdout)
        assert (found["model"], found["kv_token_bytes"]) == (name, kv_bytes)
        assert found["weights_bytes"] / 2e9 == pytest.approx(billions, rel=0.01)
        table = run("--gpus", "64", "--model", str(file), "--hardware", hardware.upper()).stdout
        assert name in table and max(map(len, table.splitlines())) <= 100


def test_a_link_that_takes_longer_than_a_step_is_what_the_step_waits_for() -> None:
    table = run("--rollout-gpus", "64", "--train-gpus", "64", "--link-gbps", "0.08").stdout
    assert "bounds the step from below" in " ".join(table.split())
    assert "link" in table.split("waits")[1].split("weights")[0]
    assert "hidden" not in table


def test_an_unknown_accelerator_is_named_by_its_option() -> None:
    result = run("--rollout-gpus", "64", "--train-gpus", "64", "--rollout-hardware", "h2000")
    assert result.exit_code == 2
    assert "--rollout-hardware = 'h2000'" in result.stderr


def test_short_steps_are_shown_in_seconds() -> None:
    short = ("--gpus", "8", "--model", "qwen2.5-7b", "--groups", "8", "--mean-tokens", "100", "--cap-tokens", "200")
    for arguments, unit in ((short, "s"), (("--gpus", "64"), "min")):
        above, below = (line.split() for line in run(*arguments).stdout.splitlines()[1:3])
        assert above[-5:] == ["generation", "training", "step", "waits", "GB"]
        assert below[-6:-3] == [unit] * 3


def test_it_takes_measured_costs(tmp_path: Path) -> None:
    file = tmp_path / "cost.toml"
    file.write_text("[cluster.cost]\nkv_token_s = 6.52e-8\nweights_s = 0.013\nrequest_s = 94e-6\nstep_s = 0.04\n")
    slow = run("--gpus", "64", "--cost", str(file), "--gpus-per-engine", "4", "--json")
    assert json.loads(slow.stdout)["cost"]["step_s"] == 0.04
    assert json.loads(slow.stdout)["rollout_gpus"] > 28
    for line, words in (
        ("kv_token_s = -1", "cost.kv_token_s = -1"),
        ("kv_token_s = nan", "cost.kv_token_s = nan"),
        ("kv_tokens = 1", "cost.kv_tokens = 1 is not valid: did you mean kv_token_s? One of kv_token_s, weights_s"),
        ("kv_token_s =", "--cost"),
    ):
        file.write_text(f"[cluster.cost]\n{line}\n")
        refused(run("--gpus", "64", "--cost", str(file), "--gpus-per-engine", "4"), words)
    for text in ("[cost]\n", "cluster = 3\n", "[cluster]\ncost = 3\n"):
        file.write_text(text)
        refused(run("--gpus", "64", "--cost", str(file), "--gpus-per-engine", "4"), "a file with a table cluster.cost")


def test_it_says_how_many_groups_to_add() -> None:
    times = ("--generation-s", "600", "--training-s", "300", "--engines", "2")
    assert json.loads(run(*times, "--json").stdout) == {
        "groups_to_add": 2,
        "engines": 4,
        "generation_s": 300.0,
        "lag_s": 300.0,
        "lag_after_s": 0.0,
    }
    assert "add 2 workers" in run(*times).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "64", "--model", "qwen2.5-33b"), "did you mean qwen2.5-32b?"),
        (("--gpus", "64", "--hardware", "h80"), "did you mean h800?"),
        (("--gpus", "4", "--model", "qwen2.5-72b"), "gpus = 4"),
        (("--gpus", "64", "--gpus-per-engine", "1"), "gpus_per_engine = 1"),
        (("--gpus", "64", "--lengths", "lognormal:7,1"), "lognormal:MU,SIGMA,CAP"),
        (("--gpus", "64", "--lengths", "uniform:7,1,100"), "lognormal:MU,SIGMA,CAP"),
        (("--gpus", "64", "--lengths", "lognormal:nan,1,100"), "lengths.mu"),
        (("--gpus", "64", "--lengths", "lognormal:400,1,30000"), "lengths.mu = 400"),
        (("--gpus", "64", "--lengths", "lognormal:7,30,30000"), "sigma is 30"),
        (("--gpus", "64", "--train-s-at", "40"), "GPUS=SECONDS"),
        (("--gpus", "64", "--train-s-at", "40=nan"), "train_s_at"),
        (("--gpus", "64", "--mean-tokens", "40000"), "mean_tokens"),
        (("--gpus", "64", "--cap-tokens", "0"), "cap_tokens = 0 is not valid: it must be 2 or above"),
        (("--generation-s", "600"), "--training-s"),
        ((), "either gpus, or both"),
        (("--gpus", "64", "--rollout-gpus", "8"), "--rollout-gpus = 8 is not valid: it must be left out with --gpus"),
        (("--gpus", "64", "--train-gpus", "8"), "--train-gpus = 8 is not valid: it must be left out with --gpus"),
        (("--gpus", "64", "--link-gbps", "80"), "--link-gbps = 80.0 is not valid: it must be left out with --gpus"),
        (
            ("--gpus", "64", "--rollout-hardware", "h20"),
            "--rollout-hardware = 'h20' is not valid: it must be left out with",
        ),
        (("--rollout-gpus", "8"), "either gpus, or both"),
        (("--gpus", "64", "--engines", "3"), "--engines = 3 is not valid: it must be left out without --generation-s"),
        (("--generation-s", "600", "--training-s", "300", "--engines", "2", "--gpus", "64"), "left out with --gen"),
        (("--gpus", "64", "--lengths", "lognormal:7,1,30000", "--mean-tokens", "900"), "left out with --lengths"),
        (
            ("--lengths", "lognormal:7,1.2,30000", "--mean-tokens", "0"),
            "--mean-tokens = 0.0 is not valid: it must be left out",
        ),
        (("--gpus", "64", "--rollout-gpus", "0"), "--rollout-gpus = 0 is not valid: it must be left out with --gpus"),
        (("--gpus", "64", "--engines", "0"), "--engines = 0 is not valid: it must be left out without --generation-s"),
        (
            ("--gpus", "12"),
            "gpus = 12 is not valid: it must be at least 14, to have room for an engine of 2 and a trainer of 12, the",
        ),
        (
            ("--gpus", "16", "--train-multiple", "8"),
            "gpus = 16 is not valid: it must be at least 18, to have room for an engine of 2 and",
        ),
        (
            TWO_BUDGETS,
            "train_gpus = 8 is not valid: it must be at least 12, to have room for a trainer of 12, the smallest",
        ),
        (
            ("--gpus", "64", "--train-s-at", "8=900", "--train-multiple", "80"),
            "at least 82, to have room for an engine of 2",
        ),
        (
            ("--gpus", "512", "--model", "qwen2.5-7b", "--gpus-per-engine", "64", "--cap-tokens", "5000000"),
            "cap_tokens = 5000000 is not valid: it must be at most",
        ),
    ],
)
def test_bad_input_is_one_line_and_prints_no_plan(arguments: tuple[str, ...], words: str) -> None:
    refused(run(*arguments), words)


def refused(result: Result, words: str) -> None:
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
