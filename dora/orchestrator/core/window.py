"""The sliding window of policy versions and the rule that keeps staleness bounded (C3).

Symbols. Version ``v`` is the weights after ``v`` steps. ``s`` is the step now being filled,
``B`` the prompt groups a step takes, ``left`` what step ``s`` still takes, ``W`` the window. A group of version ``v``
has the deadline ``v + W - 1``: trained then at the latest, its staleness is at most ``W - 1``. With ``open(d)`` the
admitted groups of deadline ``<= d`` that no step has taken,

    feasible  <=>  open(d) <= left + B * (d - s)   for every d in s .. s + W - 1

Earliest-deadline-first feasibility: the groups due by ``d`` fit into the places that steps ``s .. d`` still have.
Admission and taking keep it true, so every group is taken by its deadline (proof: docs/invariants.md).

A version may be *withheld*: it admits nothing more for now. While one is *rejected*, which is withheld too, no step
takes a group and no version is published: the window stands still. Neither changes a count.
"""

from collections.abc import Mapping, Set

from dora.errors import IllegalTransition


class Window:
    """Counts of open groups by deadline. Pure arithmetic, no group is named here.

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
        self._withheld: set[int] = set()  # versions that admit nothing for now
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

    @property
    def oldest_live(self) -> int:
        """The oldest version whose deadline is not before the step now being filled."""
        return max(0, self.step - self.size + 1)

    @property
    def oldest_kept(self) -> int:
        """The oldest version whose weights may be needed: the newest always, as a worker may join before the next."""
        return min(self.oldest_live, self.newest)

    @property
    def newest_sound(self) -> int:
        """The newest version that is not withheld. Version 0 never is."""
        version = self.newest
        while version in self._withheld:
            version -= 1
        return version

    @property
    def withheld(self) -> Set[int]:
        """Versions that admit nothing for now."""
        return self._withheld

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
        """The last step that may train on ``version``."""
        return version + self.size - 1

    def slack(self) -> list[int]:
        """``left + B * k - open(s + k)`` for k in 0 .. W-1; the state is feasible iff none is negative."""
        return [self.least_slack(deadline, deadline) for deadline in range(self.step, self.step + self.size)]

    def least_slack(self, first: int, last: int) -> int:
        """The least slack at a deadline from ``first`` to ``last``, both in the window.

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
        deadline = version + self.size - 1
        if deadline < self.step or version > self.newest or not self.groups_per_step or version in self._withheld:
            return 0
        if self.closed:
            return 0
        return self.least_slack(deadline, self.step + self.size - 1)

    def admit(self, version: int) -> None:
        """Counts one admitted group. Raises IllegalTransition where it is closed, or would become infeasible."""
        if self.admissible(version) < 1:
            raise IllegalTransition(f"a group of version {version} does not fit: {self.told()}")
        self._count(version, 1)

    def takeable(self, version: int) -> bool:
        """Whether step ``s`` may take a group of ``version`` and still keep every earlier deadline.

        Never while the step before is uncommitted: one step at a time is with the trainer. Nor while a version is
        rejected.
        """
        deadline = self.deadline(version)
        if self.left <= 0 or self.newest != self.step or deadline < self.step or self._rejected:
            return False
        return deadline == self.step or self.least_slack(self.step, deadline - 1) > 0

    def told(self) -> str:
        """Where the window stands, for messages."""
        closed = "closed; " if self.closed else ""
        return f"{closed}step {self.step} takes {self.left} more; open groups by deadline {self._open}"

    def take(self, version: int) -> bool:
        """Step ``s`` takes an open group. True where that filled the step: the window then stands at step ``s + 1``.

        Raises IllegalTransition for a group that is not open or that may not be taken before an earlier deadline.
        """
        if not self._holds(version) or not self.takeable(version):
            raise IllegalTransition(f"step {self.step} may not take a group of version {version}: {self.told()}")
        self._count(version, -1)
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

    def give_back(self, version: int) -> None:
        """An open group was cancelled: its place is free again."""
        if not self._holds(version):
            raise IllegalTransition(f"no open group of version {version} to give back: {self.told()}")
        self._count(version, -1)

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

    def withhold(self, version: int) -> None:
        """The version admits nothing until it is released. Raises IllegalTransition for one that a trainer has not
        published, or whose weights are let go."""
        if not max(1, self.oldest_kept) <= version <= self.newest:
            raise IllegalTransition(f"version {version} cannot be withheld: {self.told()}")
        self._withheld.add(version)

    def reject(self, version: int) -> None:
        """The version is to be published anew; until then the window stands still. Raises as ``withhold``."""
        self.withhold(version)
        self._rejected.add(version)

    def release(self, version: int) -> None:
        """The version is as any other again: its weights have proven good, or it was published anew."""
        self._withheld.discard(version)
        self._rejected.discard(version)

    def _holds(self, version: int) -> bool:
        """Whether a group of ``version`` is open, and in time."""
        deadline = self.deadline(version)
        return deadline >= self.step and deadline in self._open

    def _count(self, version: int, more: int) -> None:
        deadline = self.deadline(version)
        groups = self._open.get(deadline, 0) + more
        if groups:
            self._open[deadline] = groups
        else:
            del self._open[deadline]
