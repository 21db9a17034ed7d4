"""Forks of a process with an open client, such as DataLoader workers, end as they should."""

import asyncio
import os
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.service import configured, running
from tests.sweeps import counts_of


@pytest.mark.parametrize("how", [pytest.param("_exit", marks=pytest.mark.full), "pool"])
@pytest.mark.parametrize("forks", counts_of(6, 48))
async def test_a_fork_of_a_process_with_a_client_does_not_crash(how: str, forks: int, tiny_dense: Path) -> None:
    config = configured(tiny_dense, workers__engine="fake", workers__count=1)
    async with running(config) as handle:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.abuse.test_forks", handle.address, handle.token, how, str(forks)),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        assert (process.returncode, said.split()) == (0, [b"0"] * forks)


def work(_: int) -> int:
    import gc

    gc.collect()
    return 0


def forked(how: str) -> int:
    """The exit code of a fork."""
    process_id = os.fork()
    if not process_id:
        work(0)
        os._exit(0) if how == "_exit" else sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def main(address: str, token: str, how: str, forks: str) -> None:
    import dora.sync

    with dora.sync.Trainer(address, token=token) as trainer:
        for _ in next(trainer.steps(groups=2)):
            pass
        if how == "pool":
            with get_context("fork").Pool(8) as pool:
                codes = pool.map(work, range(int(forks)))
        else:
            codes = [forked(how) for _ in range(int(forks))]
    print(*codes)


if __name__ == "__main__":
    main(*sys.argv[1:])
