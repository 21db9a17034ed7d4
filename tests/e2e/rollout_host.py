"""The first host of ``test_many_hosts``: a service and an operator. ``python -m tests.e2e.rollout_host ORDERS``.

ORDERS is JSON: model (folder), settings, workers (that it waits for). It prints how others join, then that the workers
are there; then, for each line of JSON, the status once a counter has reached a value. An empty line ends it.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from dora.client import Operator
from tests.e2e.agents import are_ready
from tests.service import configured, running, until


async def main(orders: dict[str, Any]) -> None:
    config = configured(Path(orders["model"]), **orders["settings"])
    async with running(config) as handle, Operator(handle.address, handle.token) as operator:
        say({"address": handle.address, "token": handle.token})
        await until(operator, are_ready(orders["workers"]))
        say({"workers": orders["workers"]})
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            order = json.loads(line)
            name, value = order["counter"], order["value"]
            status = await until(operator, lambda status, name=name, value=value: status.counters[name] >= value)
            hosts = {each.name: each.state for each in status.hosts}
            say({"counters": dict(status.counters), "hosts": hosts})


def say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
