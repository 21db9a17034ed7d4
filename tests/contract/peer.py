"""Another process with an engine of its own: ``python -m tests.contract.peer ORDERS.json`` prints its responses."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from dora.kvtransfer.shm import ShmTransport
from tests.contract.conftest import make_engine
from tests.contract.driver import Driver, Response, mixed_requests


def main(orders_file: str) -> None:
    """Orders: kind, model, version, weights, snapshots (folder), locators (to take in), prompts (how many to start)."""
    orders = json.loads(Path(orders_file).read_text())
    engine = make_engine(orders["kind"], Path(orders["model"]))
    engine.load_weights(orders["version"], Path(orders["weights"]), None)
    transport = ShmTransport(Path(orders["snapshots"]))
    driver = Driver(engine)
    for locator in orders["locators"]:
        snapshot = transport.get(locator)
        transport.release(locator)  # its memory lives as long as the snapshot does
        engine.take_in(snapshot)
        request = snapshot.request
        driver.responses[request.request_id] = Response(list(request.output_token_ids), list(request.logprobs))
    for request in mixed_requests(orders["prompts"]):
        driver.add(request)
    responses = driver.finish()
    reprefilled_tokens = engine.load().reprefilled_tokens
    engine.close()
    responses_json = {name: asdict(response) for name, response in responses.items()}
    print(json.dumps({"responses": responses_json, "reprefilled_tokens": reprefilled_tokens}))


if __name__ == "__main__":
    main(sys.argv[1])
