"""The sliding window of policy versions and the rule that keeps staleness bounded (C3).

Symbols. Version ``v`` is the weights after ``v`` steps. ``s`` is the step now being filled,
``B`` the prompt groups a step takes, ``left`` what step ``s`` still takes, ``W`` the window in force. A group of
version ``v`` has the deadline ``v + W - 1`` from its admission on: trained then at the latest, its staleness is at most
``W - 1``. With ``open(d)`` the admitted groups of deadline ``<= d`` that no step has taken,

    feasible  <=>  open(d) <= left + B * (d - s)   for every d from s on

Earliest-deadline-first feasibility: the groups due by ``d`` fit into the places that steps ``s .. d`` still have.
Admission and taking keep it true, so every group is taken by its deadline (proof: docs/invariants.md).

``W`` may change between two steps (adaptive.py). A group keeps the deadline that it was admitted with, and a version
that has left the window does not come back.

A version may be *withheld*: it admits nothing more for now. While one is *rejected*, which is withheld too, no step
takes a group and no version is published: the window stands still. Neither changes a count.
"""

from collections.abc import Iterable, Mapping, Set

from dora.errors import IllegalTransition


class Window:
    """Counts of open groups by deadline and by version. Pure arithmetic, no group is named here.

    An operation takes as long as there are deadlines with open groups, however wide the window.
    """

    def __init__(self, size: int, groups_per_step: int) -> None:
        self.size = size
        self.groups_per_step = groups_per_step  # 0 until the first trainer says
        self.step = 0
        self.left = groups_per_step
        self.newest = 0
        self.closed = False  # nothing is admitted, whatever there is place for
        self._open: dict[int, int] = {}  # deadline -> open groups, where there are any
        self._open_of: dict[int, int] = {}  # version -> the same groups
        self._left_behind = 0  # versions below it have left the window
        self._quarantined: set[int] = set()  # versions that admit nothing for now
        self._rejected: set[int] = set()  # of these, those that are to be published anew

    def set_groups_per_step(self, groups: int) -> None:
        """Sets B, once, before anything is admitted. Raises IllegalTransition afterwards."""
        if self.groups_per_step:
            raise IllegalTransition(f"groups_per_step is {self.groups_per_step} and cannot become {groups}")
        self.groups_per_step = groups
        self.left = groups

    def resize(self, groups: int, taken: int) -> None:
        """Sets B anew, before any step was trained; ``taken`` groups are in the first. Raises IllegalTransition
        afterwards, or where the open groups would not fit."""
        if self.newest or taken > groups or self.open_groups > self.places(groups, taken):
            raise IllegalTransition(f"groups_per_step cannot become {groups} with {taken} taken: {self.told()}")
        self.groups_per_step = groups
        self.step, self.left = (1, groups) if taken == groups else (0, groups - taken)

    def places(self, groups: int, taken: int) -> int:
        """How many groups of version 0 could be open with so many groups a step, ``taken`` of them by the first."""
        return groups * self.size - taken

    def restore(self, newest: int, step: int, left: int, left_behind: int, is_open: Iterable[tuple[int, int]]) -> None:
        """A new window stands where an earlier one did: with groups open of these (version, deadline).

        Raises IllegalTransition where these cannot have been open together; it is of no use then.
        """
        self.newest, self.step, self.left, self._left_behind = newest, step, left, left_behind
        for version, deadline in is_open:
            self._count(version, deadline, 1)
        possible = newest in (step - 1, step) and (0 < left <= self.groups_per_step or left == self.groups_per_step)
        in_time = min(self._open, default=step) >= step and self.least_slack(step, self.horizon) >= 0
        if not possible or not in_time or max(self._open_of, default=0) > newest:
            raise IllegalTransition(f"no window can stand so, with version {newest} the newest: {self.told()}")

    def set_size(self, size: int) -> None:
        """Groups that are admitted from now on may be so much older than their step; open ones keep their deadlines."""
        self._left_behind = self.oldest_admitting
        self.size = size

    @property
    def left_behind(self) -> int:
        """Versions below had left the window when its size changed last."""
        return self._left_behind

    @property
    def oldest_admitting(self) -> int:
        """The oldest version that groups may still be admitted to."""
        return max(self._left_behind, self.step - self.size + 1)

    @property
    def oldest_live(self) -> int:
        """The oldest version that a step may still train on: a group of it is open, or may be admitted."""
        return min((self.oldest_admitting, *self._open_of))

    @property
    def oldest_kept(self) -> int:
        """The oldest version whose weights may be needed: the newest always, as a worker may join before the next."""
        return min(self.oldest_live, self.newest)

    @property
    def newest_sound(self) -> int:
        """The newest version that is not withheld. Version 0 never is."""
        version = self.newest
        while version in self._quarantined:
            version -= 1
        return version

    @property
    def quarantined(self) -> Set[int]:
        """Versions that admit nothing for now."""
        return self._quarantined

    @property
    def rejected(self) -> Set[int]:
        """Versions that are to be published anew, before anything else is taken or published."""
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
        """Open groups of each deadline that has any."""
        return self._open

    def deadline(self, version: int) -> int:
        """The last step that may train on a group of ``version`` that is admitted now."""
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

        Between two deadlines with open groups slack only grows, so those and ``first`` are all there is to look at.
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
        """How many more groups of ``version`` may be admitted now."""
        if not self.oldest_admitting <= version <= self.newest or not self.groups_per_step:
            return 0
        if self.closed or version in self._quarantined:
            return 0
        return self.least_slack(self.deadline(version), self.horizon)

    def admit(self, version: int) -> None:
        """Counts one admitted group, whose deadline is ``deadline(version)``. Raises IllegalTransition where it is
        closed, or would become infeasible."""
        if self.admissible(version) < 1:
            raise IllegalTransition(f"a group of version {version} does not fit: {self.told()}")
        self._count(version, self.deadline(version), 1)

    def takeable(self, deadline: int) -> bool:
        """Whether step ``s`` may take a group of this deadline and still keep every earlier one.

        Never while the step before is uncommitted: one step at a time is with the trainer. Nor while a version is
        rejected.
        """
        if self.left <= 0 or self.newest != self.step or deadline < self.step or self._rejected:
            return False
        return deadline == self.step or self.least_slack(self.step, deadline - 1) > 0

    def told(self) -> str:
        """Where the window stands, for messages."""
        closed = "closed; " if self.closed else ""
        return f"{closed}step {self.step} takes {self.left} more; open groups by deadline {self._open}"

    def take(self, version: int, deadline: int) -> bool:
        """Step ``s`` takes an open group. True where that filled the step: the window then stands at step ``s + 1``.

        Raises IllegalTransition for a group that is not open or that may not be taken before an earlier deadline.
        """
        if not self._holds(version, deadline) or not self.takeable(deadline):
            raise IllegalTransition(
                f"step {self.step} may not take a group of version {version} due at {deadline}: {self.told()}"
            )
        self._count(version, deadline, -1)
        self.left -= 1
        if self.left:
            return False
        # left = 0 and feasible, so nothing due at s is still open: no count falls out of the window
        self.step += 1
        self.left = self.groups_per_step
        return True

    def close_short(self) -> None:
        """Prompts ran out: step ``s`` ends with what it has. Raises IllegalTransition while a group is open."""
        if self.open_groups or self.left == self.groups_per_step or self._rejected:
            raise IllegalTransition(f"step {self.step} cannot end short: {self.told()}")
        self.step += 1
        self.left = self.groups_per_step

    def give_back(self, version: int, deadline: int) -> None:
        """An open group was cancelled: its place is free again."""
        if not self._holds(version, deadline):
            raise IllegalTransition(f"no open group of version {version} due at {deadline} to give back: {self.told()}")
        self._count(version, deadline, -1)

    def publish(self) -> int:
        """The step of the newest version was trained: the next version begins. Returns it.

        Raises IllegalTransition unless that step has taken all its groups, and while a version is rejected.
        """
        if self.newest >= self.step:
            raise IllegalTransition(f"version {self.newest + 1} before step {self.newest} was filled")
        if self._rejected:
            raise IllegalTransition(f"version {self.newest + 1} while {sorted(self._rejected)} are rejected")
        self.newest += 1
        return self.newest

    def quarantine(self, version: int) -> None:
        """The version admits nothing until it is released. Raises IllegalTransition for one that a trainer has not
        published, or whose weights are let go."""
        if not max(1, self.oldest_kept) <= version <= self.newest:
            raise IllegalTransition(f"version {version} cannot be withheld: {self.told()}")
        self._quarantined.add(version)

    def reject(self, version: int) -> None:
        """The version is to be published anew; until then the window stands still. Raises as ``withhold``."""
        self.quarantine(version)
        self._rejected.add(version)

    def release(self, version: int) -> None:
        """The version is as any other again: its weights have proven good, or it was published anew."""
        self._quarantined.discard(version)
        self._rejected.discard(version)

    def _holds(self, version: int, deadline: int) -> bool:
        """Whether a group of ``version`` with this deadline may be open, and is in time."""
        return deadline >= self.step and deadline in self._open and version in self._open_of

    def _count(self, version: int, deadline: int, more: int) -> None:
        for counts, key in ((self._open, deadline), (self._open_of, version)):
            groups = counts.get(key, 0) + more
            if groups:
                counts[key] = groups
            else:
                del counts[key]
