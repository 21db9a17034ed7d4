"""Versions over hosts that come and go, with late, repeated and reordered messages, in a pure world.

Each seed is a world of its own: a service that decides (``Broadcast``), hosts that obey, and queues between them that
are emptied in a random order. At its end faults stop, and every living host must have every live version.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from dora.errors import Conflict
from dora.orchestrator.hosts.broadcast import Broadcast, Command, Drop, Fetch, GaveUp, Gone, Ready
from dora.relay.link import Link
from dora.relay.orders import Arrived, FetchFailed, Upstream
from dora.weights.manifest import parsed_name, version_name
from tests.sweeps import tenth_of

SEEDS = 10_000
BLOCK = 500
HOSTS = 5
EVENTS = 40
WINDOW = 3
PLACES = ("", "east")


def name_of(version: int, edition: int = 0) -> str:
    return version_name(version, f"{edition:032x}")


@dataclass
class SimHost:
    epoch: int
    orders: "deque[Fetch | Drop]" = field(default_factory=deque)
    told: "deque[Arrived | FetchFailed]" = field(default_factory=deque)
    fetching: dict[str, Fetch] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def held(self, name: str) -> str:
        """Returns the content that the host has under this version's number."""
        return next((each for each in sorted(self.whole) if parsed_name(each)[0] == parsed_name(name)[0]), "")

    def take_in(self, name: str) -> None:
        self.whole = {each for each in self.whole if parsed_name(each)[0] != parsed_name(name)[0]} | {name}


class World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.broadcast = Broadcast()
        self.hosts: dict[str, SimHost] = {}
        self.zones: dict[str, str] = {}
        self.epochs = dict.fromkeys((f"h{at}" for at in range(HOSTS)), 0)
        self.names: dict[int, str] = {}  # live
        self.newest = 0
        self.is_calm = False
        self.leaving: set[str] = set()
        self.fault_share = self.chance.choice((0.1, 0.6))  # of fetches
        self.retired: set[int] = set()
        self.unavailable: set[str] = set()
        self.past: list[tuple[int, str, str]] = []  # publications, each of which may come again
        for host in self.epochs:
            self.join(host)

    # What happens.

    def step(self) -> None:
        acts = [
            self.publish,
            self.repeat,
            self.late,
            self.retire,
            self.kill,
            self.come,
            self.again,
            self.remind,
            self.miss,
            self.leave,
        ]
        weights = [4, 3, 3, 2, 2, 3, 1, 1, 1, 1]
        acts += [self.obey, self.finish, self.tell]
        weights += [12, 12, 12]
        self.chance.choices(acts, weights)[0]()
        self.check()

    def publish(self) -> None:
        if not self.hosts or len(self.names) >= WINDOW:
            return
        host = self.chance.choice(sorted(self.hosts))
        self.newest += 1
        name = name_of(self.newest)
        self.hosts[host].whole.add(name)
        self.names[self.newest] = name
        self.past.append((self.newest, name, host))
        self.obeyed(self.broadcast.published(self.newest, name, host, 1 << 30))

    def repeat(self) -> None:
        """A publication that was there before, of a live version: nothing may change."""
        known = [each for each in self.past if self.names.get(each[0]) == each[1]]
        if known:
            version, name, host = self.chance.choice(known)
            before = self.broadcast.versions()
            had = self.broadcast.has(host, version)
            holds = host in self.hosts and name in self.hosts[host].whole
            if had or not holds:
                if not had and host in self.hosts:
                    return  # its host has come back without it, and does not say that it has it
                assert not self.broadcast.published(version, name, host, 1 << 30)
                assert self.broadcast.versions() == before

    def late(self) -> None:
        """A retired version, or another one of a live version, is refused, and changes nothing."""
        stale = [version for version, *_ in self.past]
        if stale and self.hosts:
            version, host = self.chance.choice(stale), self.chance.choice(sorted(self.hosts))
            before = self.broadcast.versions()
            with pytest.raises(Conflict):
                self.broadcast.published(version, name_of(version, 999), host, 1 << 30)
            assert self.broadcast.versions() == before

    def again(self) -> None:
        """A live version is rejected, and published anew with other weights."""
        if self.names and self.hosts:
            version, host = self.chance.choice(sorted(self.names)), self.chance.choice(sorted(self.hosts))
            name = name_of(version, self.chance.randrange(1, 900) + len(self.past) * 1000)
            self.hosts[host].take_in(name)
            self.names[version] = name
            self.past.append((version, name, host))
            self.obeyed(self.broadcast.published(version, name, host, 1 << 30, anew=True))

    def miss(self) -> None:
        """What a host had of a version is there no more. Of the service's own, which obeys at once, so that nothing of
        the version is under way."""
        having = [(host, name) for host in sorted(self.hosts) for name in sorted(self.hosts[host].whole)]
        if having:
            host, name = self.chance.choice(having)
            own = self.hosts[host]
            under_way = name in own.fetching or any(each.name == name for each in (*own.orders, *own.told))
            if self.broadcast.has(host, parsed_name(name)[0]) and not under_way:
                assert not self.broadcast.missed(host, own.epoch - 1, name), "of a past epoch"
                own.whole.discard(name)
                self.obeyed(self.broadcast.missed(host, own.epoch, name))

    def retire(self) -> None:
        if len(self.names) > 1:
            version = min(self.names)
            del self.names[version]
            self.retired.add(version)
            self.obeyed(self.broadcast.retired(version))

    def kill(self) -> None:
        if self.hosts:
            host = self.chance.choice(sorted(self.hosts))
            epoch = self.hosts[host].epoch
            assert not self.broadcast.lost(host, epoch - 1), "of a past epoch"
            self.leaving.discard(host)
            del self.hosts[host]
            self.obeyed(self.broadcast.lost(host, epoch))
            assert not self.broadcast.lost(host, epoch), "once more"

    def leave(self) -> None:
        """A host will be lost soon: while others have a version, it stands in no chain and is to give nothing."""
        if not self.hosts:
            return
        host = self.chance.choice(sorted(self.hosts))
        assert not self.broadcast.leaving(host, self.hosts[host].epoch - 1), "of a past epoch"
        self.leaving.add(host)
        self.obeyed(self.broadcast.leaving(host, self.hosts[host].epoch))
        for version in self.names:
            if set(self.broadcast.holders(version)) - self.leaving:
                assert host not in self.broadcast.chain(version)

    def come(self) -> None:
        away = sorted(set(self.epochs) - set(self.hosts))
        if away:
            self.join(self.chance.choice(away))

    def join(self, host: str) -> None:
        """A new epoch of a host, which may have kept versions of any age."""
        self.epochs[host] += 1
        kept = {name for _, name, _ in self.past if self.chance.random() < 0.2}
        kept = {name for name in kept if sum(parsed_name(each)[0] == parsed_name(name)[0] for each in kept) == 1}
        self.hosts[host] = SimHost(self.epochs[host], whole=kept)
        self.zones[host] = zone = self.chance.choice(PLACES)
        self.obeyed(self.broadcast.joined(host, self.epochs[host], f"{host}:1", zone, kept))

    def remind(self) -> None:
        self.obeyed(self.broadcast.remind())

    def obey(self, host: str = "") -> bool:
        waiting = [each for each in sorted(self.hosts) if self.hosts[each].orders and (not host or each == host)]
        if not waiting:
            return False
        own = self.hosts[self.chance.choice(waiting)]
        order = own.orders.popleft()
        if isinstance(order, Drop):
            own.whole.discard(order.name)
            if own.fetching.pop(order.name, None):
                own.told.append(FetchFailed(order.name, "retired"))
        elif order.name in own.whole:
            own.told.append(Arrived(order.name, "", 0, 0.0, None))
        elif own.held(order.name):
            own.told.append(FetchFailed(order.name, "another one of this number is here"))
        else:
            own.fetching[order.name] = order
        return True

    def finish(self) -> bool:
        """A fetch ends: well if one of those it asks has the version; if none has, or will have it, with a failure."""
        under_way = [(host, name) for host in sorted(self.hosts) for name in sorted(self.hosts[host].fetching)]
        self.chance.shuffle(under_way)
        for host, name in under_way:
            own = self.hosts[host]
            asked = [each for each in own.fetching[name].upstreams if self.incarnations(each)]
            having = [each for each in asked if name in self.hosts[each.host].whole]
            fails = not self.is_calm and self.chance.random() < self.fault_share
            if having and not fails:
                del own.fetching[name]
                if own.held(name):
                    own.told.append(FetchFailed(name, "another one was published meanwhile"))  # and it stays
                    return True
                own.take_in(name)
                link = Link(10 ** self.chance.uniform(6, 10), 1e-4) if self.chance.random() < 0.5 else None
                own.told.append(Arrived(name, having[0].host, 1 << 30, 1.0, link))
                return True
            if fails or not any(self.comes(each, name) for each in asked):
                del own.fetching[name]
                culprits = tuple(each.host for each in asked if fails and self.chance.random() < 0.3)
                own.told.append(FetchFailed(name, "nobody gave it", culprits))
                return True
        return False

    def tell(self) -> bool:
        telling = [host for host in sorted(self.hosts) if self.hosts[host].told]
        if not telling:
            return False
        host = self.chance.choice(telling)
        own = self.hosts[host]
        outcome = own.told.popleft()
        if isinstance(outcome, Arrived):
            assert not self.broadcast.sealed(host, own.epoch - 1, outcome), "of a past epoch"
            self.obeyed(self.broadcast.sealed(host, own.epoch, outcome))
        else:
            self.obeyed(self.broadcast.failed(host, own.epoch, outcome))
        return True

    # What follows.

    def incarnations(self, upstream: Upstream) -> bool:
        own = self.hosts.get(upstream.host)
        return own is not None and own.epoch == upstream.epoch

    def comes(self, upstream: Upstream, name: str) -> bool:
        own = self.hosts[upstream.host]
        return name in own.fetching or any(isinstance(each, Fetch) and each.name == name for each in own.orders)

    def obeyed(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Fetch() | Drop():
                    assert self.hosts[command.host].epoch == command.epoch
                    if isinstance(command, Fetch):
                        version, _ = parsed_name(command.name)
                        assert self.names.get(version) == command.name, "a version that is not live is fetched"
                        assert all(self.incarnations(each) and each.host != command.host for each in command.upstreams)
                        for host, base in ((each.host, each.base) for each in command.upstreams if each.base):
                            number, _ = parsed_name(base)
                            assert base != command.name and self.names.get(number) == base
                            assert self.broadcast.has(host, number) and self.broadcast.has(command.host, number)
                            assert self.zones[host] != self.zones[command.host]
                    self.hosts[command.host].orders.append(command)
                case Ready():
                    assert command.version in self.names and self.broadcast.has(command.host, command.version)
                case Gone():
                    assert self.names.get(command.version) == command.name
                    self.unavailable.add(command.name)
                case GaveUp():
                    assert command.host in self.hosts

    def check(self) -> None:
        versions = self.broadcast.versions()
        assert versions == self.names, "a version that was retired or replaced is back, or a live one is forgotten"
        assert not self.retired & set(versions)
        for version, name in versions.items():
            for host in self.broadcast.holders(version):
                own = self.hosts[host]
                dropped = any(isinstance(each, Drop) and each.name == name for each in own.orders)
                assert name in own.whole and not dropped, f"{host} is said to have {name}"
            chain = self.broadcast.chain(version)
            assert not chain or chain[0] in self.broadcast.holders(version)
            assert set(chain) <= set(self.hosts)

    def end_all(self) -> None:
        for _ in range(4):
            while self.obey() or self.finish() or self.tell():
                self.check()
            self.remind()

    def lose_leaving(self) -> None:
        """What a host that leaves had is on all others by the time it is lost."""
        staying = set(self.hosts) - self.leaving
        for version in self.names:
            holders = set(self.broadcast.holders(version))
            assert not holders or staying <= holders, f"version {version} is on {holders} alone"
        for host in sorted(self.leaving):
            self.obeyed(self.broadcast.lost(host, self.hosts.pop(host).epoch))
        self.leaving.clear()

    def settle(self) -> None:
        """No more faults. Everything that is still under way ends, and who gave up tries again."""
        self.is_calm = True
        self.end_all()
        self.lose_leaving()
        self.end_all()
        self.check()
        for version, name in self.names.items():
            holders = [host for host, own in self.hosts.items() if name in own.whole]
            followers = self.broadcast.chain(version)[1:]
            assert len(set(followers)) == len(followers)
            assert not holders or sorted(holders) == sorted(self.hosts) == list(self.broadcast.holders(version)), name
            assert holders or name in self.unavailable or not self.hosts, f"{name} is lost, and nobody was told"
        for host, own in self.hosts.items():
            assert own.whole <= set(self.names.values()), f"{host} keeps what is not live"


@pytest.mark.parametrize("first", tenth_of(range(0, SEEDS, BLOCK)))
def test_any_order_of_publications_and_losses_ends_with_every_live_version_everywhere(first: int) -> None:
    for seed in range(first, first + BLOCK):
        world = World(seed)
        try:
            for _ in range(EVENTS):
                world.step()
            world.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
