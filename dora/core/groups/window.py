"""The sliding window of policy versions, and the rule that bounds staleness (C3).

Symbols. Version ``v`` is the weights after ``v`` steps. ``s`` is the step now being filled, ``B`` the prompt groups a
step takes, ``left`` the groups that step ``s`` still takes, ``W`` the window in force. A group of version ``v`` gets
the deadline ``v + W - 1`` at its admission: trained then at the latest, its staleness is at most ``W - 1``. With
``open(d)`` the admitted groups of deadline ``<= d`` that no step has taken,

    feasible  <=>  open(d) <= left + B * (d - s)   for every d from s on

Earliest-deadline-first feasibility: the groups due by ``d`` fit into the room that steps ``s .. d`` still have.
Admission and taking keep it true, so every group is taken by its deadline (proof: docs/invariants.md).

``W`` may change between two steps (forecast/adaptive.py). A group keeps the deadline of its admission, and a version
that has left the window does not return.

A version may be *quarantined*: it admits nothing for now. While one is *rejected*, which implies quarantine, no step
takes a group and no version is published. Neither changes a count.
"""

from collections.abc import Iterable, Mapping, Set

from dora.errors import IllegalTransition


class Window:
    """Counts of open groups by deadline and by version. Pure arithmetic; groups have no names here.

    The cost of an operation grows with the number of deadlines that have open groups, not with the window.
    """

    def __init__(self, size: int, groups_per_step: int) -> None:
        self.size = size
        self.groups_per_step = groups_per_step  # 0 until the first trainer sets it
        self.step = 0
        self.left = groups_per_step
        self.newest = 0
        self.closed = False  # nothing is admitted
        self._open: dict[int, int] = {}  # deadline -> open groups, where there are any
        self._open_of: dict[int, int] = {}  # version -> the same groups
        self._left_behind = 0  # lower versions have left the window
        self._quarantined: set[int] = set()  # versions that admit nothing for now
        self._rejected: set[int] = set()  # those of them that must be published again

    def set_groups_per_step(self, groups: int) -> None:
        """Sets B, once, before anything is admitted. Raises IllegalTransition afterwards."""
        if self.groups_per_step:
            raise IllegalTransition(f"groups_per_step is {self.groups_per_step} and cannot become {groups}")
        self.groups_per_step = groups
        self.left = groups

    def resize(self, groups: int, taken: int) -> None:
        """Changes B before any step was trained; ``taken`` groups are in the first. Raises IllegalTransition
        afterwards, or if the open groups would not fit.
        """
        if self.newest or taken > groups or self.open_groups > self.places(groups, taken):
            raise IllegalTransition(f"groups_per_step cannot become {groups} with {taken} taken: {self.summary()}")
        self.groups_per_step = groups
        self.step, self.left = (1, groups) if taken == groups else (0, groups - taken)

    def places(self, groups: int, taken: int) -> int:
        """The number of version 0's groups that could be open with so many a step, ``taken`` of them in the first."""
        return groups * self.size - taken

    def restore(self, newest: int, step: int, left: int, left_behind: int, is_open: Iterable[tuple[int, int]]) -> None:
        """Puts a new window into an earlier one's state, with open groups of these (version, deadline).

        Raises IllegalTransition if they cannot have been open together; the window is unusable then.
        """
        self.newest, self.step, self.left, self._left_behind = newest, step, left, left_behind
        for version, deadline in is_open:
            self._count(version, deadline, 1)
        possible = newest in (step - 1, step) and (0 < left <= self.groups_per_step or left == self.groups_per_step)
        in_time = min(self._open, default=step) >= step and self.least_slack(step, self.horizon) >= 0
        if not possible or not in_time or max(self._open_of, default=0) > newest:
            raise IllegalTransition(f"impossible window with newest version {newest}: {self.summary()}")

    def set_size(self, size: int) -> None:
        """Sets the maximal age of groups admitted from now on; open ones keep their deadlines."""
        self._left_behind = self.oldest_admitting
        self.size = size

    @property
    def left_behind(self) -> int:
        """Lower versions had left the window when its size changed last."""
        return self._left_behind

    @property
    def oldest_admitting(self) -> int:
        return max(self._left_behind, self.step - self.size + 1)

    @property
    def oldest_live(self) -> int:
        """The oldest version that a step may still train on: it has an open group or may admit one."""
        return min((self.oldest_admitting, *self._open_of))

    @property
    def oldest_kept(self) -> int:
        """The oldest version whose weights may be needed: always including the newest, which a joining worker loads."""
        return min(self.oldest_live, self.newest)

    @property
    def newest_sound(self) -> int:
        """The newest version that is not quarantined. Version 0 never is."""
        version = self.newest
        while version in self._quarantined:
            version -= 1
        return version

    @property
    def quarantined(self) -> Set[int]:
        return self._quarantined

    @property
    def rejected(self) -> Set[int]:
        """Versions that must be published again before anything else is taken or published."""
        return self._rejected

    @property
    def open_groups(self) -> int:
        return sum(self._open.values())

    @property
    def due(self) -> int:
        """Open groups whose deadline is step ``s``."""
        return self._open.get(self.step, 0)

    @property
    def open_by_deadline(self) -> Mapping[int, int]:
        return self._open

    def deadline(self, version: int) -> int:
        """The last step that may train on a group of ``version`` admitted now."""
        return version + self.size - 1

    @property
    def horizon(self) -> int:
        """The last deadline that a group has or may get."""
        return max((self.step + self.size - 1, *self._open))

    def slack(self) -> list[int]:
        """``left + B * k - open(s + k)`` for k from 0 to the horizon; the state is feasible iff none is negative."""
        return [self.least_slack(deadline, deadline) for deadline in range(self.step, self.horizon + 1)]

    def least_slack(self, first: int, last: int) -> int:
        """The least slack at a deadline from ``first`` to ``last``.

        Slack only grows between two deadlines with open groups, so those and ``first`` are checked.
        """
        places, step_groups = self.left - self.groups_per_step * self.step, self.groups_per_step
        taken, later = 0, []
        for deadline, groups in self._open.items():
            if deadline <= first:
                taken += groups
            elif deadline <= last:
                later.append((deadline, groups))
        least = places + step_groups * first - taken
        for deadline, groups in sorted(later):
            taken += groups
            least = min(least, places + step_groups * deadline - taken)
        return least

    def admissible(self, version: int) -> int:
        """The number of further groups of ``version`` that may be admitted now."""
        if not self.oldest_admitting <= version <= self.newest or not self.groups_per_step:
            return 0
        if self.closed or version in self._quarantined:
            return 0
        return self.least_slack(self.deadline(version), self.horizon)

    def admit(self, version: int) -> None:
        """Counts one admitted group, whose deadline is ``deadline(version)``. Raises IllegalTransition if admission is
        closed or would become infeasible.
        """
        if self.admissible(version) < 1:
            raise IllegalTransition(f"a group of version {version} does not fit: {self.summary()}", "version", version)
        self._count(version, self.deadline(version), 1)

    def takeable(self, deadline: int) -> bool:
        """Returns whether step ``s`` may take a group of this deadline and still meet every earlier one.

        False while the step before is uncommitted, as the trainer has one step at a time, or a version is rejected.
        """
        if self.left <= 0 or self.newest != self.step or deadline < self.step or self._rejected:
            return False
        return deadline == self.step or self.least_slack(self.step, deadline - 1) > 0

    def summary(self) -> str:
        closed = "closed; " if self.closed else ""
        return f"{closed}step {self.step} takes {self.left} more; open groups by deadline {self._open}"

    def take(self, version: int, deadline: int) -> bool:
        """Takes an open group into step ``s``. Returns True if that filled the step: the window is then at ``s + 1``.

        Raises IllegalTransition for a group that is not open, or that must not be taken before an earlier deadline.
        """
        if not self._holds(version, deadline) or not self.takeable(deadline):
            raise IllegalTransition(
                f"step {self.step} may not take a group of version {version} due at {deadline}: {self.summary()}"
            )
        self._count(version, deadline, -1)
        self.left -= 1
        if self.left:
            return False
        # left = 0 and feasible: no group due at s is open, so no count is lost
        self.step += 1
        self.left = self.groups_per_step
        return True

    def close_short(self) -> None:
        """Ends step ``s`` short, because prompts ran out. Raises IllegalTransition while a group is open."""
        if self.open_groups or self.left == self.groups_per_step or self._rejected:
            raise IllegalTransition(f"step {self.step} cannot end short: {self.summary()}")
        self.step += 1
        self.left = self.groups_per_step

    def give_back(self, version: int, deadline: int) -> None:
        """Frees the room of a cancelled open group."""
        if not self._holds(version, deadline):
            raise IllegalTransition(f"no open group of version {version} due at {deadline} to cancel: {self.summary()}")
        self._count(version, deadline, -1)

    def publish(self) -> int:
        """Begins the next version after the newest version's step was trained. Returns the new version.

        Raises IllegalTransition unless that step is full, and while a version is rejected.
        """
        if self.newest >= self.step:
            raise IllegalTransition(f"version {self.newest + 1} before step {self.newest} was filled")
        if self._rejected:
            raise IllegalTransition(f"version {self.newest + 1} while {sorted(self._rejected)} are rejected")
        self.newest += 1
        return self.newest

    def quarantine(self, version: int) -> None:
        """Stops admission to a version until it is released. Raises IllegalTransition for a version that no trainer has
        published, or whose weights are deleted.
        """
        if not max(1, self.oldest_kept) <= version <= self.newest:
            raise IllegalTransition(f"version {version} cannot be quarantined: {self.summary()}", "version", version)
        self._quarantined.add(version)

    def reject(self, version: int) -> None:
        """Marks a version as rejected; the window stops until it is published again. Raises like ``quarantine``."""
        self.quarantine(version)
        self._rejected.add(version)

    def release(self, version: int) -> None:
        """Ends a version's quarantine: its weights have proven good, or it was published again."""
        self._quarantined.discard(version)
        self._rejected.discard(version)

    def _holds(self, version: int, deadline: int) -> bool:
        return deadline >= self.step and deadline in self._open and version in self._open_of

    def _count(self, version: int, deadline: int, more: int) -> None:
        for counts, key in ((self._open, deadline), (self._open_of, version)):
            groups = counts.get(key, 0) + more
            if groups:
                counts[key] = groups
            else:
                del counts[key]
