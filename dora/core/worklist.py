"""What the scheduler has still to look at, so that an event costs the same with a thousand workers as with ten.

Whoever changes the state says here what has happened; the scheduler then looks at what was touched, and at nothing
else. Workers go by their indexes.
"""

from collections.abc import Iterable, Set


class Worklist:
    """Four questions: is there anything to settle; who was touched; who may have room; who is idle, or nearly full?"""

    def __init__(self) -> None:
        self._awake = False
        self._touched: set[int] = set()
        self._roomy: set[int] = set()
        self._rations: dict[int, int] = {}
        self._nearly_full: set[int] = set()
        self._idle: set[int] = set()

    # ------------------------------------------------------------------------------------------- what has happened

    def wake(self) -> None:
        """A version, worker or request changed hands, or a rest is over: there may be work to move or to give."""
        self._awake = True

    def changed(self, index: int) -> None:
        """This worker hosts, or is to host, another version, or a request has left it."""
        self._awake = True
        self._touched.add(index)

    def may_have_room(self, index: int) -> None:
        """Something has left this worker, or its KV is used otherwise, since it was found full."""
        self._roomy.add(index)

    def full(self, index: int) -> None:
        """This worker was found without room: it is no candidate until something leaves it."""
        self._roomy.discard(index)

    def fills(self, index: int, nearly_full: bool) -> None:
        """Whether this worker's KV in use is above the pressure."""
        if nearly_full:
            self._nearly_full.add(index)
        else:
            self._nearly_full.discard(index)

    def given(self, index: int) -> None:
        """This worker has something to do, or soon will."""
        self._idle.discard(index)

    def rests(self, index: int, idle: bool) -> None:
        """Once all is settled: whether this worker holds nothing, loads nothing and is to stay."""
        if idle:
            self._idle.add(index)
        else:
            self._idle.discard(index)

    def ration(self, version: int, most: int | None, hosts: Iterable[int]) -> None:
        """Each of the ``hosts`` of this version is to hold at most ``most`` requests for now; None: as many as fit.

        Those that were found full under a smaller ration are candidates again.
        """
        before = self._rations.get(version)
        if before is not None and (most is None or most > before):
            self._roomy.update(hosts)
        if most is not None:
            self._rations[version] = most
        elif before is not None:
            del self._rations[version]

    def retire(self, version: int) -> None:
        """This version is over."""
        self._rations.pop(version, None)

    # -------------------------------------------------------------------------------------------- what is to be done

    @property
    def awake(self) -> bool:
        """Whether anything is to be settled."""
        return self._awake

    @property
    def touched(self) -> Set[int]:
        """Workers that something happened to since they were last taken."""
        return self._touched

    def settle(self) -> None:
        """The scheduler begins: what happens from now on is for its next look."""
        self._awake = False

    def take_touched(self) -> list[int]:
        """Those touched, in order, each for the last time; all of them may have room."""
        indexes = sorted(self._touched)
        self._touched.clear()
        self._roomy.update(indexes)
        return indexes

    @property
    def roomy(self) -> Set[int]:
        """Workers that may have room."""
        return self._roomy

    @property
    def idle(self) -> Set[int]:
        """Workers that hold nothing, load nothing and are to stay, as of the last settling."""
        return self._idle

    @property
    def nearly_full(self) -> Set[int]:
        """Workers whose KV is nearly used up."""
        return self._nearly_full
