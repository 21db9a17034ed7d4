"""The index of who hosts what says what a look at every worker would say, whatever happened in between."""

from hypothesis import given
from hypothesis import strategies as st

from dora.core.fleet.hosting import HOSTING_COLUMNS, NO_WORKER, Hosting
from dora.core.fleet.worker import Worker

WORKERS, VERSIONS = 4, (-1, 0, 1, 2)

changes = st.lists(
    st.tuples(
        st.integers(0, WORKERS - 1),
        st.sampled_from(["joins", "leaves", "loads", "is to host", "is loading", "drains", "is stopping", "is asked"]),
        st.sampled_from(VERSIONS),
    ),
    max_size=60,
)


def check(hosting: Hosting, workers: dict[int, Worker]) -> None:
    by_index = [workers[index] for index in sorted(workers)]
    assert list(hosting.vacating()) == [worker for worker in by_index if worker.vacating]
    columns = hosting.columns(WORKERS)
    for index in range(WORKERS):
        worker = workers.get(index)
        expected = NO_WORKER if worker is None else tuple(getattr(worker, name) for name in HOSTING_COLUMNS[1:])
        assert tuple(columns[name][index] for name in HOSTING_COLUMNS[worker is not None :]) == expected
        assert columns["alive"][index] == (worker is not None and not worker.stopping)
    staying = [worker for worker in by_index if not worker.draining and not worker.stopping]
    assert hosting.staying() == (len(staying), sum(worker.kv_tokens for worker in staying))
    assert set(hosting.leaving()) == {worker.loaded for worker in by_index if worker.vacating}
    for version in VERSIONS:
        if version >= 0:
            assert hosting.loading(version) == {worker.index for worker in by_index if worker.loading == version}
        assert hosting.targeting(version) == {worker.index for worker in by_index if worker.target == version}
        if version >= 0:
            assert list(hosting.workers_of(version)) == [worker for worker in by_index if worker.hosts == version]


@given(changes)
def test_the_index_is_what_a_look_at_every_worker_says(made: list[tuple[int, str, int]]) -> None:
    hosting, workers = Hosting(), dict[int, Worker]()
    for number, (index, change, version) in enumerate(made):
        worker = workers.get(index)
        if change == "joins" and worker is None:
            workers[index] = Worker(f"w{number}", number, index, slots=8, kv_tokens=100)
        elif worker is None:
            continue
        elif change == "leaves":
            del workers[index]
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
            hosting.moved(index, workers.get(index))
    check(hosting, workers)
