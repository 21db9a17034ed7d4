"""The numbers of every live response that a report needs, in columns indexed by the core's rows."""

from collections.abc import Sequence

import numpy as np

from dora.data.token_spans import Column
from dora.orchestrator.rollout.responses.session_paths import InputRun

ROWS_MIN = 1024


class ResponseColumns:
    """Holds one value per response. Only ``begin``, ``extend``, ``expect``, ``number`` and ``give`` write."""

    def __init__(self) -> None:
        self.buffered: Column = np.zeros(ROWS_MIN, np.int64)  # tokens
        self.version: Column = np.zeros(ROWS_MIN, np.int64)
        self.max_tokens: Column = np.zeros(ROWS_MIN, np.int64)
        self.turn_begins: Column = np.zeros(ROWS_MIN, np.int64)  # the tokens before the present turn's sampled ones
        self.first_fed: Column = np.zeros(ROWS_MIN, np.int64)  # as ``session_paths.first_fed`` of the present turn
        self.heard_at: Column = np.zeros(ROWS_MIN, np.float64)  # when its last tokens came
        self.arrives: Column = np.zeros(ROWS_MIN, np.bool_)  # its next tokens may begin a segment
        self.begins: Column = np.zeros(ROWS_MIN, np.bool_)  # its next tokens are the first of a turn
        self.numbers: Column = np.zeros(ROWS_MIN, np.int64)  # in the journal; -1: of an evaluation
        self.attempts: Column = np.zeros(ROWS_MIN, np.uint8)  # sessions: replacements before
        self.shifts: Column = np.zeros(ROWS_MIN, np.int64)  # sessions: tokens held that are not on the present path

    def begin(self, rows: Column, version: int, max_tokens: int, prompt_tokens: int, at: float) -> None:
        self._reach(int(rows.max()) + 1)
        self.buffered[rows] = 0
        self.version[rows] = version
        self.max_tokens[rows] = max_tokens
        self.turn_begins[rows] = 0
        self.first_fed[rows] = prompt_tokens
        self.heard_at[rows] = at
        self.arrives[rows] = self.begins[rows] = True
        self.numbers[rows] = -1
        self.attempts[rows] = self.shifts[rows] = 0

    def extend(self, rows: Column, buffered: Column, at: Column | float) -> None:
        """Sets the number of tokens of each response, and when the last ones came."""
        self.buffered[rows] = buffered
        self.heard_at[rows] = at
        self.begins[rows] = buffered == 0

    def expect(self, row: int, arrives: bool) -> None:
        """Sets whether the response's next tokens may begin a segment."""
        self.arrives[row] = arrives

    def number(self, rows: int | Sequence[int], numbers: int | Sequence[int], attempt: int = 0) -> None:
        self.numbers[rows], self.attempts[rows] = numbers, attempt

    def give(self, row: int, run: InputRun, first_fed: int, at: float, buffered: int = -1) -> None:
        """Begins a turn of a session. ``buffered`` counts its path's response tokens (-1: up to the given ones)."""
        self.buffered[row] = run.end if buffered < 0 else buffered
        self.max_tokens[row] = run.end + run.max_tokens
        self.shifts[row] = run.buffer_begin - run.first_token
        self.heard_at[row] = at
        self.begins[row] = buffered < 0  # a restored turn may have tokens
        self.turn_begins[row], self.first_fed[row] = run.end, first_fed

    def _reach(self, rows: int) -> None:
        lacking = rows - len(self.buffered)
        if lacking > 0:
            for name, column in vars(self).items():
                setattr(self, name, np.concatenate([column, np.zeros(max(lacking, rows), column.dtype)]))
