"""The commands that start something, and what belongs to all commands: serve, demo, host, front, prepare, version."""

import inspect
from collections.abc import Sequence
from typing import Final

import dora
from dora.ops.cli import demo, tls
from dora.ops.cli.control.service import COMMANDS as SERVICE_COMMANDS
from dora.ops.cli.guarded import OPTIONS as TLS_OPTIONS
from tests.unit.cli.service import TOKEN as SERVICE_TOKEN
from tests.unit.effects import of_environments
from tests.unit.effects.commands import Bench, Done, OptionRow, Ran, Sets, Shown
from tests.unit.effects.of_operators import is_json

# ---------------------------------------------------------------------------------------------------------- dora serve

CHECKED: Final = ("serve", "--dry-run", "--model", "{dense}", "--prompts", "tiny", "--listen", "127.0.0.1:0")
FAKE: Final = ("--set", "workers.engine=fake", "--set", "workers.max_model_len_tokens=512")


def unserved(bench: Bench) -> None:
    """A service that would start says so."""

    async def said(_config: object, as_json: bool, _front: object) -> int:
        print(f"serves, {as_json}")
        return 0

    bench.monkeypatch.setattr("dora.ops.cli.serve._serve", said)
    (bench.folder / "own.toml").write_text("[window]\nsize = 5\n")


SERVE: Final[dict[tuple[str, str], OptionRow]] = {
    ("serve", "config_file"): Ran(
        [*CHECKED, *FAKE, "--json"], ["--config", "{folder}/own.toml"], lambda d: d.at("window.size") == 5, unserved
    ),
    ("serve", "settings"): Sets("window.size", ["--set", "window.size=3"], 3),
    ("serve", "window"): Sets("window.size", ["--window", "3"], 3),
    ("serve", "workers"): Sets("workers.count", ["--workers", "5"], 5),
    ("serve", "model"): Sets("model", ["--model", "tiny-moe"], "tiny-moe"),
    ("serve", "prompts"): Sets("prompts.source", ["--prompts", "counting"], "counting"),
    ("serve", "reward"): Sets("reward.function", ["--reward", "a:b"], "a:b"),
    ("serve", "environment"): Sets("environment.spec", ["--environment", "a:b"], "a:b"),
    ("serve", "record"): Sets("record", ["--record", "kept"], "kept"),
    ("serve", "record_weights"): Sets("record_weights", ["--record-weights", "none"], "none"),
    ("serve", "state"): Sets("service.state", ["--state", "kept"], "kept"),
    ("serve", "begin_from"): Sets("service.begin_from", ["--from", "kept@3"], "kept@3"),
    ("serve", "device"): Sets("workers.device", ["--device", "cuda:1"], "cuda:1"),
    ("serve", "gpus_for_trainer"): Sets("workers.gpus_for_trainer", ["--gpus-for-trainer", "2"], 2),
    ("serve", "carry_on_from"): Sets("service.carry_on_from", ["--carry-on-from", "4"], 4),
    ("serve", "kv_tier"): Sets("kv.tier", ["--kv-tier", "lmcache"], "lmcache"),
    ("serve", "listen"): Sets("service.listen", ["--listen", "127.0.0.1:0"], "127.0.0.1:0"),
    ("serve", "metrics"): Sets("service.metrics", ["--metrics", "127.0.0.1:0"], "127.0.0.1:0"),
    ("serve", "log_format"): Sets("service.log_format", ["--log-format", "json"], "json"),
    ("serve", "traces"): Sets("service.traces", ["--traces", "http://127.0.0.1:4318"], "http://127.0.0.1:4318"),
    ("serve", "token"): Sets("service.token", ["--token-file", "{token}"], SERVICE_TOKEN),
    ("serve", "tls"): Sets("tls.folder", ["--tls", "certificates"], "certificates"),
    ("serve", "tls_cert"): Sets("tls.cert", ["--tls-cert", "c.pem"], "c.pem"),
    ("serve", "tls_key"): Sets("tls.key", ["--tls-key", "k.pem"], "k.pem"),
    ("serve", "tls_ca"): Sets("tls.ca", ["--tls-ca", "a.pem"], "a.pem"),
    ("serve", "tls_clients"): Sets("tls.clients", ["--tls-clients", "token"], "token"),
    ("serve", "dry_run"): Ran(
        [*(each for each in CHECKED if each != "--dry-run"), *FAKE],
        ["--dry-run"],
        lambda done: done.code == 0 and "serves" not in done.out and "[window]" in done.out,
        unserved,
    ),
    ("serve", "http"): Ran([*CHECKED, *FAKE], ["--http", "127.0.0.1:99999"], lambda done: "--http" in done.said),
    ("serve", "http_key"): Ran(
        [*CHECKED, *FAKE, "--http", "0.0.0.0:0"], ["--http-key-file", "{token}"], lambda done: done.code == 0
    ),
    ("serve", "as_json"): Ran([*CHECKED, *FAKE], ["--json"], is_json, unserved),
}

# ----------------------------------------------------------------------------------------------------------- dora host


HOST: Final = ("host", "--join", "{address}", "--rejoin-s", "0")
TOKEN: Final = ("--token-file", "{token}")


def introduced(given: Sequence[str], words: str) -> Ran:
    """``words``: of how the host introduces itself to the service."""
    return Ran([*HOST, *TOKEN], given, lambda done: words in done.said)


JOINED: Final = "tests/e2e/test_hosts_join.py::"
HOSTS: Final[dict[tuple[str, str], OptionRow]] = {
    ("host", "join"): Ran(["host", *HOST[3:], *TOKEN], HOST[1:3], lambda done: "hello" in done.said),
    ("host", "workers"): introduced(["--workers", "3"], "with 3 workers"),
    ("host", "name"): introduced(["--name", "h7"], "h7 with"),
    ("host", "device"): introduced(["--device", "cuda:99"], "--device"),
    ("host", "gpus_for_trainer"): introduced(["--gpus-for-trainer", "99"], "--gpus-for-trainer"),
    ("host", "model"): Shown(JOINED + "test_a_host_that_cannot_serve_is_told_why"),
    ("host", "folder"): Ran([*HOST, *TOKEN], ["--folder", "{folder}/mine"], lambda done: bool(done.files)),
    ("host", "kv_host"): Shown("tests/e2e/test_hosts.py::test_requests_move_over_bad_links_or_stay"),
    ("host", "zone"): introduced(["--zone", "eu"], "in eu"),
    ("host", "probes"): Shown("tests/e2e/test_probes.py::test_probes_say_who_is_alive_and_who_serves"),
    ("host", "notice_s"): Shown("tests/e2e/test_probes.py::test_probes_say_who_is_alive_and_who_serves"),
    ("host", "rejoin_s"): Shown(JOINED + "test_a_host_that_cannot_serve_is_told_why"),
    ("host", "token"): Ran(HOST, TOKEN, lambda done: "hello" in done.said),
}

# ---------------------------------------------------------------------------------------------------------- dora front

FRONT: Final = ("front", "--service", "{address}", *TOKEN)  # its service's model is on no host


FRONTS: Final[dict[tuple[str, str], OptionRow]] = {
    ("front", "service"): Ran(
        ["front", "--service", "nowhere", *TOKEN], FRONT[1:3], lambda done: "--model" in done.said
    ),
    ("front", "listen"): Ran(FRONT, ["--http", "127.0.0.1:99999"], lambda done: "--http" in done.said),
    ("front", "model"): Ran(FRONT, ["--model", "{folder}"], lambda done: "for its tokenizer" not in done.said),
    ("front", "key"): Ran(
        [*FRONT, "--http", "0.0.0.0:0"], ["--key-file", "{token}"], lambda done: "--key-file" not in done.said
    ),
    ("front", "tool_format"): Ran(FRONT, ["--tool-format", "none"], lambda done: "--tool-format" in done.said),
    ("front", "tls_clients"): Ran(FRONT, ["--tls-clients", "none"], lambda done: "--tls-clients" in done.said),
    ("front", "token"): Ran(FRONT[:3], TOKEN, lambda done: "--model" in done.said),
}

# ---------------------------------------------------------------------------------------------- demo, prepare, version

DEMO: Final = Shown("tests/unit/test_demo_options.py::test_every_option_of_the_demo_has_an_effect")
SHELL: Final = "tests/unit/cli/test_completion.py::test_the_script_that_shells_load_is_shown"


def home(bench: Bench) -> None:
    bench.monkeypatch.setenv("XDG_CACHE_HOME", str(bench.folder / "users"))


def version(done: Done) -> bool:
    return done.code == 0 and dora.__version__ in done.out


GUARD: Final = "tests/unit/cli/test_tls.py::"
TAKEN: Final = Shown(GUARD + "test_every_command_on_a_service_takes_tls_and_refuses_bad_files_in_one_line")
MADE: Final = Shown(GUARD + "test_a_clusters_certificates_are_made_and_renewed")
CLUSTERS: Final = "tests/clusters/test_slurm.py::"
SLURM: Final = Shown(CLUSTERS + "test_a_run_outlives_what_slurm_does_to_it")
JOBS: Final = Shown(CLUSTERS + "test_what_slurm_refuses_is_said_and_nothing_stays")
FOLLOWS: Final = Shown(CLUSTERS + "test_a_host_is_asked_for_as_the_service_advises")
WITHOUT_RAY: Final = Shown("tests/clusters/test_ray.py::test_without_ray_one_line_says_what_to_do")
GUARDED: Final = ("host", "front", "environment", *SERVICE_COMMANDS, "eval", "token", "doctor")

ROWS: Final[dict[tuple[str, str], OptionRow]] = {
    **SERVE,
    **HOSTS,
    **{(command, option): TAKEN for command in GUARDED for option in TLS_OPTIONS},
    **{("tls make", option): MADE for option in inspect.signature(tls.make).parameters},
    **{("cluster up", option): SLURM for option in ("file", "hosts", "as_json")},
    **{("cluster scale", option): SLURM for option in ("file", "hosts", "as_json")},
    **{("cluster status", option): JOBS for option in ("file", "as_json")},
    ("cluster down", "file"): SLURM,
    **{("cluster follow", option): FOLLOWS for option in ("file", "address", "token", "once")},
    **{(f"cluster {command}", "on_ray"): WITHOUT_RAY for command in ("up", "scale", "status", "down", "follow")},
    ("cluster up", "dry_run"): Shown(CLUSTERS + "test_the_scripts_can_be_read_and_submitted_by_hand"),
    **FRONTS,
    **of_environments.OPTIONS,
    **{("demo", name): DEMO for name in inspect.signature(demo.demo).parameters},
    ("prepare", "model"): Ran(["prepare", "--cache", "{folder}/own"], ["tiny"], lambda d: "tiny" in d.out, home),
    ("prepare", "cache"): Ran(
        ["prepare", "tiny"], ["--cache", "{folder}/own"], lambda d: any(f.startswith("own/") for f in d.files), home
    ),
    ("prepare", "as_json"): Ran(["prepare", "tiny", "--cache", "{folder}/own"], ["--json"], is_json, home),
    ("version", "as_json"): Ran(["version"], ["--json"], is_json),
    ("", "_version"): Ran([], ["--version"], version),
    ("", "show_completion"): Shown(SHELL),
    ("", "install_completion"): Shown(SHELL),
}
