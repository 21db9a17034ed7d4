"""The index of who hosts what says what a look at every worker would say, whatever happened in between."""

from hypothesis import given
from hypothesis import strategies as st

from dora.orchestrator.core.hosting import EMPTY_SEAT, SEATED, Hosting
from dora.orchestrator.core.worker import Worker

SEATS, VERSIONS = 4, (-1, 0, 1, 2)

changes = st.lists(
    st.tuples(
        st.integers(0, SEATS - 1),
        st.sampled_from(["joins", "leaves", "loads", "is to host", "is loading", "drains", "is stopping", "is asked"]),
        st.sampled_from(VERSIONS),
    ),
    max_size=60,
)


def check(hosting: Hosting, workers: dict[int, Worker]) -> None:
    by_seat = [workers[seat] for seat in sorted(workers)]
    assert list(hosting.vacating()) == [worker for worker in by_seat if worker.vacating]
    columns = hosting.seated(SEATS)
    for seat in range(SEATS):
        worker = workers.get(seat)
        expected = EMPTY_SEAT if worker is None else tuple(getattr(worker, name) for name in SEATED[1:])
        assert tuple(columns[name][seat] for name in SEATED[worker is not None :]) == expected
        assert columns["alive"][seat] == (worker is not None and not worker.stopping)
    staying = [worker for worker in by_seat if not worker.draining and not worker.stopping]
    assert hosting.staying() == (len(staying), sum(worker.kv_tokens for worker in staying))
    assert set(hosting.leaving()) == {worker.loaded for worker in by_seat if worker.vacating}
    for version in VERSIONS:
        if version >= 0:
            assert hosting.loading(version) == {worker.seat for worker in by_seat if worker.loading == version}
        assert hosting.targeting(version) == {worker.seat for worker in by_seat if worker.target == version}
        if version >= 0:
            assert list(hosting.hosts(version)) == [worker for worker in by_seat if worker.hosts == version]


@given(changes)
def test_the_index_is_what_a_look_at_every_worker_says(made: list[tuple[int, str, int]]) -> None:
    hosting, workers = Hosting(), dict[int, Worker]()
    for number, (seat, change, version) in enumerate(made):
        worker = workers.get(seat)
        if change == "joins" and worker is None:
            workers[seat] = Worker(f"w{number}", number, seat, slots=8, kv_tokens=100)
        elif worker is None:
            continue
        elif change == "leaves":
            del workers[seat]
        elif change == "loads":
            worker.loaded, worker.loading = version, -1
        elif change == "is to host":
            worker.target = version
        elif change == "is loading":
            worker.loaded, worker.loading = -1, version
        elif change == "drains":
            worker.draining = True
        elif change == "is stopping":
            worker.stopping = True
        if change == "is asked":  # not after every change: several may come between two questions
            check(hosting, workers)
        else:
            hosting.moved(seat, workers.get(seat))
    check(hosting, workers)
