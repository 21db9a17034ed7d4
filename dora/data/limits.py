"""Bounded number types for settings.

No real use lies beyond the bounds. An integer must fit into its column, and the data drawn from it into memory; any
other number must neither overflow nor cause an endless wait.
"""

from typing import Annotated, Final

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from dora.errors import InvalidValue

WINDOW_MAX: Final = 64
GROUPS_MAX: Final = 1 << 20
GROUP_SIZE_MAX: Final = 4096
WINDOW_REQUESTS_MAX: Final = 1 << 20  # requests in a service's window, at some kilobytes each
TOKENS_MAX: Final = 1 << 30
PROMPT_TOKENS_MAX: Final = 2048
ID_CHARACTERS_MAX: Final = 256  # of the name of a prompt or of a task
TEXT_BYTES_MAX: Final = 4 << 20  # of a prompt's text or chat
SAMPLING_BYTES_MAX: Final = 16 << 10  # of a prompt's sampling parameters
STOPS_MAX: Final = 16  # stop strings of a request
DRAFT_TOKENS_MAX: Final = 16  # of one request in one step of an engine
STOP_CHARACTERS_MAX: Final = 128  # of one of them
STOP_TOKENS_MAX: Final = 64  # stop token ids of a request
PRIORITY_MAX: Final = 1000  # of a prompt; the minimum is its negative
COUNT_MAX: Final = 1 << 20
KV_TOKENS_MAX: Final = 1 << 40

# vLLM silently raises a temperature between 0 and 0.01, and refuses one above 2.
TEMPERATURE_MIN: Final = 0.01
TEMPERATURE_MAX: Final = 2.0

Share = Annotated[float, Ge(0.0), Le(1.0)]
PositiveShare = Annotated[float, Gt(0.0), Le(1.0)]
Fraction = Annotated[float, Ge(0.0), Lt(1.0)]
Scale = Annotated[float, Ge(1e-6), Le(1e6)]  # what something else is multiplied by

Seconds = Annotated[float, Ge(0.0), Le(1e5)]  # of one wait: more than a day
Timeout = Annotated[float, Gt(0.0), Le(1e5)]  # seconds
Period = Annotated[float, Ge(1e-3), Le(1e5)]  # seconds between two of the same
Latency = Annotated[float, Ge(0.0), Le(60.0)]  # seconds of one message
StepSeconds = Annotated[float, Ge(0.0), Le(1e4)]  # of one part of an engine's step

Count = Annotated[int, Ge(1), Le(COUNT_MAX)]  # of accelerators, slots, parts of a batch
Groups = Annotated[int, Ge(1), Le(GROUPS_MAX)]  # prompt groups of a step
GroupSize = Annotated[int, Ge(1), Le(GROUP_SIZE_MAX)]
GroupSizeMin = Annotated[int, Ge(0), Le(GROUP_SIZE_MAX)]  # 0: not given (validation.check_size_min)
Versions = Annotated[int, Ge(1), Le(WINDOW_MAX)]  # that may be live
Turns = Annotated[int, Ge(1), Le(4096)]  # of one trajectory
Tokens = Annotated[int, Ge(1), Le(TOKENS_MAX)]  # of one response: its square has to fit into 64 bits
AddedTokens = Annotated[int, Ge(0), Le(TOKENS_MAX)]  # to one context
PromptTokens = Annotated[int, Ge(1), Le(PROMPT_TOKENS_MAX)]  # where lognormal prompts are cut
KvTokens = Annotated[int, Ge(1), Le(KV_TOKENS_MAX)]  # of one engine: the sum over all has to fit into 64 bits

Bytes = Annotated[float, Ge(0.0), Le(1e18)]
PositiveBytes = Annotated[float, Ge(1.0), Le(1e18)]  # also: in a second
TokenBytes = Annotated[float, Ge(1.0), Le(1e12)]  # of one cached token

StopString = Annotated[str, MinLen(1), MaxLen(STOP_CHARACTERS_MAX)]

LogTokens = Annotated[float, Ge(-50.0), Le(50.0)]  # e^21 is the most Tokens
Sigma = Annotated[float, Ge(0.0), Le(20.0)]  # of log lengths
LatencySigma = Annotated[float, Ge(0.0), Le(3.0)]  # of a million calls the longest then takes 17,000 times the mean


def check_size_min(size_min: object, group_size: int, field: str) -> None:
    """Raises InvalidValue for a number of members that cannot start a group of ``group_size`` alone; 0 is not given.

    One reward differs from no other, so a group of several starts with two at least.
    """
    if type(size_min) is not int or (size_min and not min(2, group_size) <= size_min <= group_size):
        raise InvalidValue(field, size_min, f"0, or a whole number from 2 to the group size of {group_size}")
