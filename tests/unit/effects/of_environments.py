"""Settings and options of environments."""

from typing import Final

from tests.unit.effects.commands import OptionRow, Ran
from tests.unit.effects.rows import Row, Shown

UNIT: Final = "tests/unit/test_driven_environments.py::"
E2E: Final = "tests/e2e/test_environment_fake.py::"
POOL: Final = "tests/unit/test_environment_pool.py::"
BOUNDED: Final = Shown(UNIT + "test_a_bounded_number_runs_and_starts_up_at_once")
LIMITED: Final = Shown(UNIT + "test_a_process_ends_itself_at_its_limits")

ROWS: Final[dict[str, Row]] = {
    "environment.spec": Shown(E2E + "test_a_service_trains_while_its_environment_is_killed"),
    "environment.python": Shown("tests/clients/test_verifiers.py::test_a_taskset_that_does_not_load_is_refused"),
    "environment.timeout_s": Shown(UNIT + "test_what_fails_gives_its_session_up_with_the_reason_in_one_line"),
    "environment.turns": Shown(UNIT + "test_a_session_ends_after_its_turns_or_where_the_context_is_full"),
    "environment.at_once": BOUNDED,
    "environment.starting": BOUNDED,
    "environment.warm": Shown(
        "tests/e2e/test_environment_fake.py::test_the_sessions_of_a_killed_process_go_on_at_another"
    ),
    "environment.verdicts": Shown(POOL + "test_the_cache_is_bounded_and_keeps_what_was_used_last"),
    "environment.memory_mb": LIMITED,
    "environment.open_files": LIMITED,
    "environment.processes": LIMITED,
}

TOKEN: Final = ("--token-file", "{token}")
DRIVES: Final = ("environment", "tests.unit.environment_classes:Echo", "--service", "{address}")

OPTIONS: Final[dict[tuple[str, str], OptionRow]] = {
    ("environment", "spec"): Shown(UNIT + "test_a_class_that_cannot_drive_sessions_is_refused_by_name"),
    ("environment", "service"): Ran([*DRIVES[:2], *TOKEN], DRIVES[2:], lambda done: "--model" in done.said),
    ("environment", "model"): Ran(
        [*DRIVES, *TOKEN], ["--model", "{folder}"], lambda done: "for its tokenizer" not in done.said
    ),
    ("environment", "settings"): Ran(
        [*DRIVES, *TOKEN], ["--set", "environment.at_once=0"], lambda done: "at_once" in done.said
    ),
    ("environment", "token"): Ran(DRIVES, TOKEN, lambda done: "--model" in done.said),
}
