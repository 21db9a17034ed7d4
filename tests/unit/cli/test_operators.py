"""Operator commands against a real gRPC service on loopback: tables, JSON, tokens, what is refused, ``watch``."""

import json
from pathlib import Path

import pytest

from dora.ops.cli.exits import ExitCode
from dora.ops.cli.output import plain
from dora.ops.stored_token import find_token, left_token, token_file
from dora.ops.view.live import spark_line
from dora.ops.view.narration import Narrator, news
from dora.ops.view.numbers import duration, number
from dora.rpc import dora_pb2 as pb
from tests.private_token import with_token
from tests.unit.cli.service import STATUS, TOKEN, at, dora, free_port


def test_status_prints_a_table_or_json(address: str) -> None:
    table = at(address, "status").stdout
    for words in ("tiny", "2 versions, newest v3", "3, 3 of 4 groups taken", "w1 loading", "1 min 2 s", "12.25"):
        assert words in table
    tree = json.loads(at(address, "status", "--json").stdout)
    assert tree == plain(STATUS)
    assert (tree["newest_version"], tree["counters"]["groups_admitted"], tree["draining"]) == (3, 15.0, False)


def test_versions_prints_the_newest_first_and_json(address: str) -> None:
    table = at(address, "versions").stdout
    assert table.index("v3") < table.index("v2")
    rows = json.loads(at(address, "versions", "--json").stdout)["versions"]
    assert [(row["version"], row["deadline_step"], row["newest"]) for row in rows] == [(2, 3, False), (3, 4, True)]


def test_workers_are_printed_by_name_and_by_version_and_as_json(address: str) -> None:
    for command in (("workers",), ("versions", "--workers")):
        table = at(address, *command).stdout
        for words in ("w0", "w1", "v2  to  v3", "25%", "silent for 61 s"):
            assert words in table
    by_version = json.loads(at(address, "versions", "--workers", "--json").stdout)
    assert by_version == json.loads(at(address, "versions", "--workers", "--json").stdout)
    rows = json.loads(at(address, "workers", "--json").stdout)["workers"]
    assert sorted(row["worker_id"] for row in by_version["groups"]) == [row["worker_id"] for row in rows]
    assert [row["worker_id"] for row in rows] == ["w0", "w1", "w2"]
    assert (rows[0]["pid"], rows[1]["target_version"], rows[2]["version"]) == (7, 3, -1)


def test_trajectories_filters_and_limits(address: str) -> None:
    rows = json.loads(at(address, "trajectories", "--state", "running", "--json").stdout)
    assert [row["trajectory_id"] for row in rows["trajectories"]] == ["g3.0"]
    limited = at(address, "trajectories", "--limit", "1").stdout
    assert "1 of 2" in limited
    assert "5/9" in limited
    assert "g3.1" not in limited


def test_migrate_drain_and_rebalance_say_what_was_begun(address: str) -> None:
    assert at(address, "migrate", "g3.0", "--to", "w1").stdout == "g3.0 moves to w1\n"
    assert json.loads(at(address, "drain", "w0", "--json").stdout) == {"message": "w0 drains", "moves": 4, "loads": 0}
    assert json.loads(at(address, "rebalance", "--json").stdout)["loads"] == 1


def test_cancel_says_what_became_of_each_and_what_stays_is_4(address: str) -> None:
    done = at(address, "cancel", "q1", "q2", "q4", "--reason", "mistyped")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "q1: removed from the queue",
        "q2: its group g2 is cancelled",
        "q4: was cancelled before",
    ]
    stays = at(address, "cancel", "q3", "nobody")
    assert stays.exit_code == ExitCode.REFUSED
    assert "q3: its group g3 stays: a step has taken it\nnobody: unknown" in stays.stdout
    tree = json.loads(at(address, "cancel", "q1", "--json").stdout)
    assert tree == {"cancelled": [{"name": "q1", "state": "dequeued", "group_id": ""}]}
    assert at(address, "cancel").exit_code == ExitCode.USAGE


def test_what_the_service_refuses_is_4_with_its_own_sentence(address: str) -> None:
    unknown = at(address, "migrate", "g9.9", "--to", "w1")
    assert (unknown.exit_code, unknown.stdout) == (ExitCode.REFUSED, "")
    assert "g9.9" in unknown.stderr and "g3.0" in unknown.stderr
    wrong = at(address, "migrate", "g3.0", "--to", "w0", "--json")
    assert (wrong.exit_code, wrong.stdout) == (ExitCode.REFUSED, "")
    assert "a worker of version 2" in wrong.stderr


def test_a_wrong_token_and_no_token_are_5(address: str) -> None:
    wrong = dora("status", "--address", address, "--token-file", with_token("nonsense"))
    assert wrong.exit_code == ExitCode.UNAUTHENTICATED
    assert "nonsense" not in wrong.stderr
    none = dora("status", "--address", address)
    assert none.exit_code == ExitCode.UNAUTHENTICATED
    assert "DORA_TOKEN" in none.stderr


def test_no_service_is_3_and_names_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    failed = at(address, "status", "--json")
    assert (failed.exit_code, failed.stdout) == (ExitCode.UNREACHABLE, "")
    assert address in failed.stderr


def test_the_token_comes_from_the_environment_or_from_the_service_on_this_host(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left_token(address, TOKEN) as file:
        assert file.stat().st_mode & 0o777 == 0o600
        assert dora("status", "--address", address, "--json").exit_code == ExitCode.OK
    assert not file.exists()
    monkeypatch.setenv("DORA_TOKEN", TOKEN)
    monkeypatch.setenv("DORA_ADDRESS", address)
    assert dora("status", "--json").exit_code == ExitCode.OK


def test_a_token_of_this_host_is_sent_to_no_other(address: str) -> None:
    with left_token(address, TOKEN):
        assert find_token(address) == TOKEN
        assert find_token(f"elsewhere.example:{address.rpartition(':')[2]}") == ""


def test_a_token_that_another_service_left_stays() -> None:
    with left_token("127.0.0.1:7070", "first"):
        token_file("127.0.0.1:7070").write_text("second\n")
    assert find_token("127.0.0.1:7070") == "second"


# -------------------------------------------------------------------------------------------------------------- watch


def test_watch_tells_news_once_where_there_is_no_terminal(address: str) -> None:
    lines = at(address, "watch", "--period-ms", "50").stdout.splitlines()
    assert "step 2 committed: mean reward 0.500, staleness mean 0.25 max 1, 1,234 tokens" in lines
    assert "w2 lost: silent for 61 s" in lines
    assert len(lines) == len(set(lines))


def test_watch_prints_one_json_document_a_line(address: str) -> None:
    shown = at(address, "watch", "--json", "--updates", "1").stdout.splitlines()
    assert [json.loads(line) for line in shown] == [plain(STATUS)]


def test_news_names_what_changed_between_two_statuses() -> None:
    after = pb.Status()
    after.CopyFrom(STATUS)
    sent = {"loss": 0.25, "kl": 1e-6, "lr": 0.1, "tokens": 1e6, "z": 1.0}
    after.steps.add(step=3, mean_reward=0.75, tokens=10, metrics=sent)
    after.counters["migrations_kv"] = 3
    after.workers[1].version = 3
    after.workers[2].state, after.workers[2].epoch = "ready", 5
    assert news(STATUS, after) == [
        "step 3 committed: mean reward 0.750, staleness mean 0.00 max 0, 10 tokens, loss 0.25, kl 1e-06, lr 0.1, "
        "tokens 1,000,000",
        "w1 now hosts v3",
        "w2 is back (epoch 5)",
        "requests migrated with their KV: 3",
    ]
    assert news(after, after) == []
    empty = pb.Status()
    assert news(empty, empty) == [] and empty == pb.Status(), "a look at a counter adds none"


def test_an_alarm_of_the_trainer_is_told_once() -> None:
    after = pb.Status()
    after.CopyFrom(STATUS)
    after.steps.add(step=3, metrics={"alarm_clip_fraction": 0.2, "clip_fraction": 0.31})
    told = [line for line in news(STATUS, after) if "ALARM" in line]
    assert told == ["ALARM: step 3: clip_fraction 0.31 is above 0.2"] and news(after, after) == []


def test_the_narrator_keeps_its_pace_and_gives_signs_of_life() -> None:
    narrator = Narrator()
    assert len(narrator.tell(STATUS, 0.0)) == 4
    changed = pb.Status()
    changed.CopyFrom(STATUS)
    changed.counters["migrations_kv"] = 1
    assert narrator.tell(changed, 1.0) == []
    assert narrator.tell(changed, 2.0) == ["requests migrated with their KV: 1"]
    assert narrator.tell(changed, 5.0) == []
    assert narrator.tell(changed, 17.0) == ["filling step 3, 3 of 4 groups taken, 4 requests running"]
    changed.counters["migrations_kv"] = 2
    assert narrator.tell(changed, 17.1, last=True) == ["requests migrated with their KV: 1"]


def test_numbers_and_durations_for_people() -> None:
    assert [duration(seconds) for seconds in (1.5, 62, 3725)] == ["1.5 s", "1 min 2 s", "1 h 2 min"]
    assert [number(value) for value in (1234.0, 12.345)] == ["1,234", "12.35"]
    assert spark_line([0.0, 0.5, 1.0]) == "▁▄█"
    assert spark_line([]) == ""


def test_a_checkpoint_says_what_is_on_disk(address: str) -> None:
    shown = at(address, "checkpoint")
    assert shown.exit_code == 0
    assert shown.stdout == (
        "/out/state: step 3, 9 groups (4 with the trainer), 0 queued prompts; "
        "log 3.1 MB in 2 segments, 1.0 MB of it live\n"
    )
    assert json.loads(at(address, "checkpoint", "--json").stdout)["live_bytes"] == 1 << 20


def test_a_named_checkpoint_keeps_that_of_the_trainer_too(address: str, tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "trainer.json").write_text("{}")
    named = ("checkpoint", "--name", "tuned", "--trainer", str(tmp_path))
    shown = at(address, *named)
    assert shown.exit_code == 0 and "version 3 is kept" in shown.stdout and "/out/state@tuned" in shown.stdout
    assert (tmp_path / "tuned" / "trainer.json").read_text() == "{}"
    assert at(address, *named).exit_code, "a checkpoint does not change"
    refused = at(address, "checkpoint", "--trainer", str(tmp_path))
    assert refused.exit_code and "--name" in refused.stderr
