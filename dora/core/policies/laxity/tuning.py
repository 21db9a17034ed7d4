"""Every constant of the strategy, each with its reason. No service needs another value: none of them is a setting."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Shares are of what the name says; those named ``_step`` of a step's time."""

    # how full a worker's KV is kept
    fill: float = 0.97  # what is planned with: the rest is for tokens that come between two reports
    believed_fill: float = 0.955  # where lengths are predicted: forecasts err, and preemption costs more than it gains
    engine_tokens: tuple[float, ...] = (0.0, 300.0, 600.0, 1_000.0)  # ahead: beyond, the next plan can still move some
    # time: a response should end before its deadline though steps and tokens take a little longer than of late
    safety: float = 1.04  # a token takes this much longer
    loss: float = 1.04  # a step takes this much longer than its work on KV that is always full
    margin_step: float = 0.08  # the last responses of a version end this much before its deadline
    shortest_step: float = 0.8  # of the mean step: a run of short prompts must not leave the long ones out
    tail_step: float = 0.12  # training after a step's last group: longer, the trainer was behind and will not be again
    # the schedule: of the workers that the newest and the due version share
    head_share: float = 0.3  # the newest's from the start: its long responses begin then
    tail_share: float = 0.3  # the due one's to its end: its long responses end then
    least_workers: float = 3.5  # a version that has fewer leaves too much of them empty as its last responses end
    longest_stride: int = 2  # versions: a longer one makes responses staler, for next to nothing
    # reservations
    # fmt: off
    grid_tokens: tuple[float, ...] = (  # ahead: close where most is decided, and as far as long responses go
        0, 250, 500, 750, 1000, 1500, 2000, 3000, 4000, 5500, 7000, 9000, 11000, 13500, 16000, 19000, 22000, 25500,
    )
    # fmt: on
    refresh_s: float = 5.0  # the forecast is made anew after this,
    refresh_step: float = 0.02  # or this: in between it only grows. Where KV is ample only the latter counts
    # what may begin where lengths are predicted: a response may turn out many times longer
    at_once: float = 1 / 12  # of a version's life: until then prompts of any length begin,
    begun: float = 3 / 4  # and from here on the shortest alone, rather than nothing
    risk_sd: float = 1.5  # standard deviations of the log length that count where the next version is taken up soon,
    risk: float = 3.0  # and times the prediction, at most
    outmost_sd: float = 3.0  # no response is expected to become longer than this
    unhurried: float = 1.25  # a version with time for so many times the longest is in no hurry: any length begins
    # which prompt begins
    early_step: float = 0.3  # after a publish what cannot end in time goes first for so long: later it delays more
    dense: float = 0.10  # slots in use exceed KV in use by this share: longer prompts are taken
    tries: int = 8  # prompts looked at for one whose KV fits: each costs a forecast
    reach: int = 48  # prompts that one is picked from by length: of more, steps would differ too much in work
    step_down: float = 0.8  # where a prompt does not fit, the next one tried is shorter by this
    # how many workers a version needs
    horizon_tokens: float = 1_500.0  # it needs room for what its requests will have grown to by then
    ample: float = 2.0  # times what has begun and a step to come fill: from there on nobody is packed tight,
    still_ample: float = 1.4  # and down to this: right after a publish a step counts as begun and as to come
    new_share: float = 0.25  # of what new groups fill at full length, where KV is ample: they end one by one
    # moves
    level_tokens: float = 600.0  # workers are levelled by the KV that they will hold after so many tokens
    pressed: float = 0.90  # share of KV above which a worker is relieved,
    level_gap: float = 0.06  # as far as another is this much emptier: less is not worth a move
    # reserved workers (optional, only with ``balance.cost``)
    reserved_fill: float = 0.55  # a worker is as fast as is worth while, where nothing needs less
    worth: float = 0.95  # and that is worth while only where a token takes less than this share of a full one's time
    least_fill: float = 0.82  # of what the longest responses need: emptier, a reserved worker costs too much
    near_share: float = 0.03  # of the longest: a response with less to come needs no reserved worker any more
    ahead_tokens: float = 1_500.0  # a reserved worker has room for what its responses will have grown to by then
    haste: float = 0.25  # its fill grows with this power of its responses' context: young ones are cheap to hurry
    sticky: float = 1.05  # a response stays on one that is slower than it needs by less than this: moves cost too
    fills: int = 64  # levels of KV that are looked at
    halvings: int = 20  # of the interval that the shortest step is sought in


TUNING = Tuning()
