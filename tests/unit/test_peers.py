"""The figures of ``perf/peers.py`` from a record, and the code that it counts."""

from pathlib import Path

from dora.data.types import Prompt
from perf.peer_figures import code_lines, seconds_to_level, staleness_of, versions_of
from perf.peer_record import Response, trajectories_of
from perf.peers import PEERS


def test_each_token_of_a_mixed_response_counts_for_its_version() -> None:
    prompt = Prompt("p", "tiny", (1, 4), sampling={"max_tokens": 4})
    response = Response([5, 6, 7, 8], [-1.0] * 4, [(2, 0, 0), (3, 1, 3)])
    mixed, fresh = trajectories_of("0", prompt, [response, Response([5], [-1.0], [(4, 0, 0)])], [0.0, 1.0], step=4)
    assert {version: which.tolist() for version, which in versions_of(mixed).items()} == {
        2: [True, False, False, False],
        3: [False, True, True, True],
    }
    assert staleness_of(mixed) == 4 - (2 + 3 * 3) / 4
    assert staleness_of(fresh) == 0


def test_a_level_is_reached_when_five_steps_in_a_row_have_it() -> None:
    times = [float(step) for step in range(8)]
    assert seconds_to_level([1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0], times) == 7.0
    assert seconds_to_level([0.4] * 8, times) is None


def test_lines_of_code_leave_out_comments_and_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(
        'def one():\n    """Words.\n\n    More."""\n\n    # why\n    return 1\n\n\ndef two():\n    return 2\n'
    )
    assert code_lines(file, ["one"]) == 2


def test_the_code_that_is_counted_exists() -> None:
    assert all(peer.effort == "2 commands" or int(peer.effort) > 10 for peer in PEERS)
