"""The adaptive window (``window.size = "auto"``): as narrow as possible without losing time or harming learning.

A window changes by one version at a time, between two steps. Groups of the previous size stay open for a while, so the
first ``max(size, size before)`` steps are ignored. Then ``window.look_steps`` or more are measured, and these rules
apply in this order:

1. *Too far off-policy*: the clipped fraction is above ``window.clip_fraction_max``, or the effective sample size is
   below ``window.effective_sample_min``. The window gets narrower.
2. *A trial*: each other change is a trial. A wider window stays if its steps are cheaper than the previous ones by half
   of ``window.wait_share``. A narrower one stays if its steps are not dearer by as much. Otherwise the window returns
   to its previous size. If the variance of steps makes this unclear, more steps are measured, up to ``PATIENCE`` times
   as many, unless a wider window seems dearer by a standard error: its staleness costs samples meanwhile. If it is
   still unclear then, the size that seems cheaper wins, or the narrower one if the trainer reports no movement, because
   what its staleness costs is then unknown.
3. *Staleness costs more than it saves*: by its steps' length when it was left, the next narrower window is cheaper now.
   It is tried, even while it rests.
4. *The trainer waits* for more than ``window.wait_share`` of the steps' time: a wider window is tried, if the signals
   are far enough from their limits, and if it would be cheaper with half of the wait, or as long as it was before.
5. *Nothing has changed* for half of ``window.rest_steps``: a narrower window is tried.

The cost of steps is their length times the samples that their staleness costs (staleness.py). The policy's movement is
known in a window of 1 too, so a run begins narrow while its policy moves fast, and widens as it settles.

A size that lost a trial rests: it is not tried for ``window.rest_steps``, and for twice as long each further time. So
changes become rarer if conditions stay the same (hysteresis). A narrower size rests for longer while the trainer waits
even in the wider one: until its trial would cost a quarter of ``window.wait_share`` of the time since the last.

Their length is that of a step or of a token, whichever varies less (pace.py). In *DORA* (section 7) the window is set
by hand for each task.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from statistics import median
from typing import Any, Final

from dora.config import WindowConfig
from dora.core.forecast.pace import Pace, clear
from dora.core.forecast.staleness import price_of, samples_factor

PATIENCE: Final = 4
STEPS_KEPT: Final = 64  # the latest steps of one size
REST_MAX: Final = 1024  # in steps
ROOM: Final = 0.7  # share of a signal's limit below which a wider window may be tried
WAIT_SAVED: Final = 0.5  # share of a wait that a wider window is expected to save; the first one in dora-64: 0.6
TRIALS_MAX: Final = 0.25  # of window.wait_share: the time that trials of a dear narrower size may cost
TRAINED_MIN: Final = 1e-3  # of a step's time: the least that counts as training


@dataclass(frozen=True, slots=True)
class StepSignals:
    """One committed step's signals for the window. A signal is None if the trainer does not report it."""

    took_s: float  # since the previous commit
    waited_s: float | None = None  # part of it in which the trainer waited for groups
    clip_fraction: float | None = None
    effective_sample: float | None = None  # 0 to 1
    movement: float | None = None  # KL of the version before the step from the one after it, nats a token
    staleness: float = 0.0  # mean over the step's groups
    tokens: float = 1.0  # of the step's groups, above 0


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of the window, as shown to operators."""

    step: int  # the step whose commit caused it
    before: int
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Trial:
    before: int  # the previous size
    pace: Pace  # at the previous size
    factor: float  # of samples, at the previous size


class AdaptiveSize:
    """Chooses the window size from each step's signals. Deterministic; it has no side effects."""

    def __init__(self, config: WindowConfig) -> None:
        self.size = config.least
        self.last: Resize | None = None
        self.price = 0.0  # of a version of staleness at present, see ``price_of``; 0: no movement is reported
        self._config = config
        self._steps = 0  # since the start
        self._settles = 0  # future steps to ignore
        self._seen = 0  # measured steps with this size
        self._trial: _Trial | None = None
        self._rest_until: dict[int, int] = {}  # size -> first step (a value of ``_steps``) that may try it again
        self._rest_steps: dict[int, int] = {}  # size -> length of its next rest
        self._dear_until: dict[int, int] = {}  # size -> the same step while the trainer waits in the wider size too
        self._times: deque[tuple[float, float, float]] = deque(maxlen=STEPS_KEPT)  # durations, training times, tokens
        self._clips: deque[float] = deque(maxlen=config.look_steps)
        self._samples: deque[float] = deque(maxlen=config.look_steps)
        self._latest: deque[float] = deque(maxlen=config.look_steps)  # movements, of ignored steps too
        self._movements: deque[float] = deque(maxlen=config.look_steps)
        self._staleness: deque[float] = deque(maxlen=config.look_steps)
        self._lengths: dict[int, Pace] = {}  # size -> the latest that a change ended

    def saw(self, step: int, signals: StepSignals | None) -> Resize | None:
        """Records a committed step. Returns the window's change for later admissions, if any.

        ``signals`` is None if the step is not comparable, as when a trainer started again.
        """
        self._steps += 1
        if signals is not None and signals.movement is not None:
            self._latest.append(signals.movement)
            self.price = price_of(signals.staleness, median(self._latest), self._config.staleness_cost)
        if self._settles or signals is None:
            self._settles = max(0, self._settles - 1)
            return None
        self._seen += 1
        self._note(signals)
        found = self._decide() if self._seen >= self._config.look_steps else None
        if found is None:
            return None
        size, reason = found
        if self._times:
            self._lengths[self.size] = Pace.of(self._times)
        self.last = Resize(step, self.size, size, reason)
        self._settles, self._seen = max(size, self.size), 0
        self.size = size
        for values in (self._times, self._clips, self._samples, self._movements, self._staleness):
            values.clear()
        return self.last

    def snapshot(self) -> dict[str, Any]:
        """The state that survives a crash, as plain values."""
        trial = self._trial
        return {
            "counts": [self._steps, self._settles, self._seen],
            "trial": None if trial is None else [trial.before, *astuple(trial.pace)],
            "factor": 1.0 if trial is None else trial.factor,
            "dear": [list(pair) for pair in self._dear_until.items()],
            "rests": [[size, until, self._rest_steps[size]] for size, until in self._rest_until.items()],
            "seen": [list(values) for values in (self._times, self._clips, self._samples)],
            "moved": [list(values) for values in (self._movements, self._staleness)],
            "priced": [self.price, *self._latest],
            "lengths": [[size, astuple(pace)] for size, pace in self._lengths.items()],
            "last": None if self.last is None else [*astuple(self.last)],
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restores the state from ``snapshot``. The caller restores ``size``. A trial ends if its size before is not
        allowed by this configuration.
        """
        self._steps, self._settles, self._seen = values["counts"]
        if values["trial"] is not None:
            before, *pace = values["trial"]
            is_allowed = self._config.least <= before <= self._config.most
            self._trial = _Trial(before, Pace.restored(pace), values["factor"]) if is_allowed else None
        self._rest_until = {size: until for size, until, _ in values["rests"]}
        self._rest_steps = {size: steps for size, _, steps in values["rests"]}
        self._dear_until = dict(values["dear"])
        times, clips, samples = values["seen"]
        self._times.extend((took_s, trained_s, tokens) for took_s, trained_s, tokens in times)
        self._clips.extend(clips)
        self._samples.extend(samples)
        for kept, values_of in zip((self._movements, self._staleness), values["moved"], strict=True):
            kept.extend(values_of)
        self.price, *latest = values["priced"]
        self._latest.extend(latest)
        self._lengths = {size: Pace.restored(pace) for size, pace in values["lengths"]}
        self.last = None if values["last"] is None else Resize(*values["last"])

    def _note(self, signals: StepSignals) -> None:
        took_s = signals.took_s
        if signals.waited_s is not None:
            self._times.append((took_s, max(took_s - signals.waited_s, TRAINED_MIN * took_s), signals.tokens))
        if signals.clip_fraction is not None:
            self._clips.append(signals.clip_fraction)
        if signals.effective_sample is not None:
            self._samples.append(signals.effective_sample)
        if signals.movement is not None:
            self._movements.append(signals.movement)
            self._staleness.append(signals.staleness)

    def _decide(self) -> tuple[int, str] | None:
        far = self._too_far()
        if far and self.size > self._config.least:
            self._trial = None
            self._rest(self.size)
            return self.size - 1, far
        if len(self._times) < self._config.look_steps:
            return None  # its trainer does not report waiting times
        pace = Pace.of(self._times)
        if self._trial is not None:
            stays = self._stays(self._trial, pace)
            if stays is None:
                return None
            trial, self._trial = self._trial, None
            if not stays:
                self._rest(self.size)
                change = f"the trainer waited {trial.pace.waited:.0%} of a step before, and {pace.waited:.0%} since"
                return trial.before, f"{self.size} did not pay: {change}{self._cost_of_staleness()}"
            self._rest(trial.before)
            self._rest_if_dear(trial, pace)
        return self._leave_staleness(pace) or self._try_wider(pace) or self._try_narrower(pace)

    def _stays(self, trial: _Trial, pace: Pace) -> bool | None:
        wider = trial.before < self.size
        dearer, error = self._dearer(trial, pace)
        least = self._config.wait_share / 2
        gain = -dearer - least if wider else least - dearer
        unclear = abs(gain) < clear(min(pace.steps, trial.pace.steps)) * error
        costs = wider and bool(self._movements) and gain < -error
        if self._looks_on and unclear and not costs:
            return None
        if self._movements:
            return gain >= 0.0
        return gain >= error if wider else gain >= -error

    def _dearer(self, trial: _Trial, pace: Pace) -> tuple[float, float]:
        """The cost of steps now, relative to those before the trial, less 1; and its standard error."""
        length, factor = pace.over(trial.pace), self._factor() / trial.factor
        return length.mean * factor - 1.0, length.error * factor

    def _try_wider(self, pace: Pace) -> tuple[int, str] | None:
        size = self.size + 1
        if pace.waited <= self._config.wait_share or size > self._config.most or self._rests(size):
            return None
        trained = pace.trained
        if not self._has_room() or (self._looks_on and trained.mean - 1.0 < clear(pace.steps) * trained.error):
            return None
        length = 1.0 - WAIT_SAVED * pace.waited  # relative to the present one
        if (known := self._lengths.get(size)) is not None:
            length = min(length, known.over(pace).mean)
        if self._factor() <= length * self._factor(1.0):
            return None  # its staleness would cost more than it saves
        self._trial = _Trial(self.size, pace, self._factor())
        return size, f"the trainer waited {pace.waited:.0%} of a step"

    def _leave_staleness(self, pace: Pace) -> tuple[int, str] | None:
        size = self.size - 1
        known = self._lengths.get(size)
        if size < self._config.least or known is None:
            return None
        saved = known.over(pace).mean * self._factor(-1.0) / self._factor() - 1.0
        if saved >= -self._config.wait_share / 2:
            return None
        self._trial = _Trial(self.size, pace, self._factor())
        return size, f"{size} would be cheaper{self._cost_of_staleness()}"

    def _try_narrower(self, pace: Pace) -> tuple[int, str] | None:
        size = self.size - 1
        if size < self._config.least or self._rests(size) or 2 * self._seen < self._config.rest_steps:
            return None
        if pace.waited > self._config.wait_share and self._steps < self._dear_until.get(size, 0):
            return None
        self._trial = _Trial(self.size, pace, self._factor())
        return size, f"whether {size} will do is tried: the trainer waited {pace.waited:.0%} of a step"

    @property
    def _looks_on(self) -> bool:
        """Returns whether more steps of this size may be measured if the result is unclear."""
        return self._seen < PATIENCE * self._config.look_steps

    def _too_far(self) -> str:
        config = self._config
        clip, sample = self._clip(), self._sample()
        if clip > config.clip_fraction_max:
            return f"clipped fraction {clip:.1%} is above {config.clip_fraction_max:.1%}"
        if sample < config.effective_sample_min:
            return f"effective sample size {sample:.1%} is below {config.effective_sample_min:.1%}"
        return ""

    def _has_room(self) -> bool:
        config = self._config
        lost, lost_most = 1.0 - self._sample(), 1.0 - config.effective_sample_min
        return self._clip() <= ROOM * config.clip_fraction_max and lost <= ROOM * lost_most

    def _clip(self) -> float:
        return median(self._clips) if self._clips else 0.0

    def _sample(self) -> float:
        return median(self._samples) if self._samples else 1.0

    def _factor(self, more: float = 0.0) -> float:
        """The factor of samples at the measured staleness and ``more``; 1 if the trainer reports no movement."""
        if not self._movements:
            return 1.0
        staleness = max(0.0, median(self._staleness) + more)
        return samples_factor(staleness, median(self._movements), self._config.staleness_cost)

    def _cost_of_staleness(self) -> str:
        cost = self._factor() - 1.0
        return f"; staleness costs {cost:.0%} of the samples" if cost >= 0.005 else ""

    def _rests(self, size: int) -> bool:
        return self._steps < self._rest_until.get(size, 0)

    def _rest(self, size: int) -> None:
        steps = self._rest_steps.get(size, self._config.rest_steps)
        self._rest_until[size] = self._steps + steps
        self._rest_steps[size] = min(2 * steps, REST_MAX)

    def _rest_if_dear(self, trial: _Trial, pace: Pace) -> None:
        """After a wider size has stayed, makes the narrower one rest, which bounds the cost of its trials."""
        dear = 1.0 / (1.0 + self._dearer(trial, pace)[0]) - 1.0
        if trial.before < self.size:
            lost = (self.size + self._config.look_steps) * dear  # steps' worth, in one trial
            self._dear_until[trial.before] = self._steps + int(lost / (TRIALS_MAX * self._config.wait_share))
