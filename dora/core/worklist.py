"""The scheduler's worklist: an event costs the same with a thousand workers as with ten.

Code that changes the state notes the change here; the scheduler then checks only the touched workers, by index.
"""

from collections.abc import Iterable, Set


class Worklist:
    """Knows whether anything is unsettled, and which workers were touched, may have room, are idle or nearly full."""

    def __init__(self) -> None:
        self._awake = False
        self._touched: set[int] = set()
        self._roomy: set[int] = set()
        self._rations: dict[int, int] = {}
        self._nearly_full: set[int] = set()
        self._idle: set[int] = set()

    # ------------------------------------------------------------------------------------------- what has happened

    def wake(self) -> None:
        """A version, worker or request changed hands, or a pause has ended: there may be work to move or assign."""
        self._awake = True

    def changed(self, index: int) -> None:
        """The worker's version or target has changed, or a request has left it."""
        self._awake = True
        self._touched.add(index)

    def may_have_room(self, index: int) -> None:
        """A request has left this worker, or its KV use has changed, since it was found full."""
        self._roomy.add(index)

    def full(self, index: int) -> None:
        """This worker has no room: it is no candidate until a request leaves it."""
        self._roomy.discard(index)

    def fills(self, index: int, nearly_full: bool) -> None:
        """Notes whether this worker's KV in use is above the pressure threshold."""
        if nearly_full:
            self._nearly_full.add(index)
        else:
            self._nearly_full.discard(index)

    def assigned(self, index: int) -> None:
        """This worker has work, or soon will."""
        self._idle.discard(index)

    def rests(self, index: int, idle: bool) -> None:
        """Notes after settling whether this worker holds nothing, loads nothing and stays."""
        if idle:
            self._idle.add(index)
        else:
            self._idle.discard(index)

    def ration(self, version: int, most: int | None, hosts: Iterable[int]) -> None:
        """Limits the requests of each of this version's ``hosts`` to ``most`` for now, or to no limit if it is None.

        Workers that were full under a smaller ration become candidates again.
        """
        before = self._rations.get(version)
        if before is not None and (most is None or most > before):
            self._roomy.update(hosts)
        if most is not None:
            self._rations[version] = most
        elif before is not None:
            del self._rations[version]

    def retire(self, version: int) -> None:
        self._rations.pop(version, None)

    # -------------------------------------------------------------------------------------------- what is to be done

    @property
    def awake(self) -> bool:
        """Returns whether anything is to be settled."""
        return self._awake

    @property
    def touched(self) -> Set[int]:
        """Workers touched since the last ``take_touched``."""
        return self._touched

    def settle(self) -> None:
        """Begins settling: later changes are for the next check."""
        self._awake = False

    def take_touched(self) -> list[int]:
        """Returns and clears the touched workers, in order; all of them may have room."""
        indexes = sorted(self._touched)
        self._touched.clear()
        self._roomy.update(indexes)
        return indexes

    @property
    def roomy(self) -> Set[int]:
        return self._roomy

    @property
    def idle(self) -> Set[int]:
        """Workers that hold nothing, load nothing and stay, as of the last settling."""
        return self._idle

    @property
    def nearly_full(self) -> Set[int]:
        return self._nearly_full
