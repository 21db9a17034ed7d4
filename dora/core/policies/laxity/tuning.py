"""Every constant of the strategy, with its reason. None is a setting, as no service needs another value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """The strategy's constants. A share is of the quantity in its name, a ``_step`` value of a step's time."""

    # how full a worker's KV is kept
    fill: float = 0.97  # planned fill: the rest is for tokens that arrive between two reports
    # if lengths are predicted: forecasts err, and preemption costs more than the fill gains
    believed_fill: float = 0.955
    # ahead: the next plan can still move requests before later ones
    engine_tokens: tuple[float, ...] = (0.0, 300.0, 600.0, 1_000.0)
    # time: a response should end before its deadline even if steps and tokens take slightly longer than recently
    safety: float = 1.04  # factor on a token's time
    loss: float = 1.04  # factor on a step's time, which assumes that KV is always full
    margin_step: float = 0.08  # a version's last responses end this long before its deadline
    shortest_step: float = 0.8  # of the mean step: a series of short prompts must not exclude the long ones
    # training after a step's last group; a longer one means that the trainer was behind, which is not repeated
    tail_step: float = 0.12
    # unlike machines: a worker counts as faster if a token takes at most this share of its time on another
    faster: float = 0.9
    # the schedule: shares of the workers that the newest and the due version have together
    head_share: float = 0.3  # of the newest version from its start: its long responses begin then
    tail_share: float = 0.3  # of the due version until its end: its long responses end then
    least_workers: float = 3.5  # a version with fewer leaves too many of them empty while its last responses end
    longest_stride: int = 2  # versions: a longer stride makes responses staler and gains almost nothing
    # reservations
    # fmt: off
    grid_tokens: tuple[float, ...] = (  # ahead: dense where most is decided, and as long as the longest responses
        0, 250, 500, 750, 1000, 1500, 2000, 3000, 4000, 5500, 7000, 9000, 11000, 13500, 16000, 19000, 22000, 25500,
    )
    # fmt: on
    refresh_s: float = 5.0  # age at which the forecast is rebuilt
    # the same in steps. Between rebuilds a forecast only grows. If KV is ample, only this limit counts
    refresh_step: float = 0.02
    # limits on what may begin if lengths are predicted: a response may turn out many times longer
    at_once: float = 1 / 12  # of a version's life: until then prompts of any length may begin
    begun: float = 3 / 4  # of a version's life: from then on only the shortest may begin
    risk_sd: float = 1.5  # standard deviations of the log length that count if the next version is taken up soon
    risk: float = 3.0  # upper limit of that, as a multiple of the prediction
    outmost_sd: float = 3.0  # no response is expected to exceed this
    unhurried: float = 1.25  # a version with time for this multiple of the longest response begins any length
    # the prompt that begins
    early_step: float = 0.3  # after a publish, late prompts go first for this long: later they would delay more
    dense: float = 0.10  # longer prompts are chosen if slots in use exceed KV in use by this share
    tries: int = 8  # prompts examined for one whose KV fits: each costs a forecast
    reach: int = 48  # prompts among which one is chosen by length: with more, the work of steps would vary too much
    step_down: float = 0.8  # if a prompt does not fit, the next one tried is shorter by this factor
    # the number of workers that a version needs
    horizon_tokens: float = 1_500.0  # a version needs room for the size of its requests after this many tokens
    ample: float = 2.0  # KV is ample from this multiple of the workers that running requests and one more step fill
    # and stays ample down to this one: right after a publish a step counts both as running and as future
    still_ample: float = 1.4
    new_share: float = 0.25  # of what new groups fill at full length if KV is ample: they end one by one
    # moves
    level_tokens: float = 600.0  # workers are levelled by their KV after this many tokens
    pressed: float = 0.90  # share of KV above which a worker is relieved
    level_gap: float = 0.06  # another worker must be emptier by this: a smaller difference is not worth a move
    # reserved workers (optional, only with ``balance.cost``)
    reserved_fill: float = 0.55  # fill of a reserved worker that is not needed emptier
    worth: float = 0.95  # a reserved worker pays only if its token takes less than this share of a full worker's time
    least_fill: float = 0.82  # of what the longest responses need: an emptier reserved worker costs too much
    near_share: float = 0.03  # of the longest: a response with less to generate needs no reserved worker
    ahead_tokens: float = 1_500.0  # a reserved worker has room for the size of its responses after this many tokens
    # a worker's fill grows with this power of its responses' context: young responses are cheap to hurry
    haste: float = 0.25
    sticky: float = 1.05  # a response stays on a worker that is too slow by less than this: moves cost time too
    fills: int = 64  # levels of KV that are examined
    halvings: int = 20  # steps of the bisection for the shortest step


TUNING = Tuning()
