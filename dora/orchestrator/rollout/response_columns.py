"""The numbers of every live response that a report needs, in columns indexed by the core's rows."""

import numpy as np

from dora.data.token_spans import Column

ROWS_MIN = 1024


class ResponseColumns:
    """``begin``, ``extend``, ``expect``, ``number`` and ``give`` are the only writers."""

    def __init__(self) -> None:
        self.held: Column = np.zeros(ROWS_MIN, np.int64)  # tokens
        self.version: Column = np.zeros(ROWS_MIN, np.int64)
        self.max_tokens: Column = np.zeros(ROWS_MIN, np.int64)
        self.prompt_tokens: Column = np.zeros(ROWS_MIN, np.int64)
        self.heard_at: Column = np.zeros(ROWS_MIN, np.float64)  # when its last tokens came
        self.arrives: Column = np.zeros(ROWS_MIN, np.bool_)  # its next tokens may begin a segment
        self.numbers: Column = np.zeros(ROWS_MIN, np.int64)  # in the journal; -1: of an evaluation
        self.attempts: Column = np.zeros(ROWS_MIN, np.uint8)  # sessions: replacements before

    def begin(self, rows: Column, version: int, max_tokens: int, prompt_tokens: int, at: float) -> None:
        """Adds responses without tokens."""
        self._reach(int(rows.max()) + 1)
        self.held[rows] = 0
        self.version[rows] = version
        self.max_tokens[rows] = max_tokens
        self.prompt_tokens[rows] = prompt_tokens
        self.heard_at[rows] = at
        self.arrives[rows] = True
        self.numbers[rows] = -1
        self.attempts[rows] = 0

    def extend(self, rows: Column, held: Column, at: Column | float) -> None:
        """``held``: tokens of each response now. ``at``: when the last ones came."""
        self.held[rows] = held
        self.heard_at[rows] = at

    def expect(self, row: int, arrives: bool) -> None:
        """``arrives``: the response's next tokens may begin a segment."""
        self.arrives[row] = arrives

    def number(self, row: int, number: int, attempt: int = 0) -> None:
        self.numbers[row], self.attempts[row] = number, attempt

    def give(self, row: int, tokens: int, max_tokens: int) -> None:
        """Adds given tokens, after which at most ``max_tokens`` are sampled."""
        self.held[row] += tokens
        self.max_tokens[row] = self.held[row] + max_tokens

    def _reach(self, rows: int) -> None:
        lacking = rows - len(self.held)
        if lacking > 0:
            for name, column in vars(self).items():
                setattr(self, name, np.concatenate([column, np.zeros(max(lacking, rows), column.dtype)]))
