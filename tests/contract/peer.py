"""Another process with an engine of its own: ``python -m tests.contract.peer ORDERS.json`` prints its responses."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.contract.conftest import make_engine
from tests.contract.driver import Driver, Response, mixed_requests
from tests.contract.planes import a_plane


def main(orders_file: str) -> None:
    """Orders: kind, model, version, weights, snapshots (folder), transport, fingerprint (of the one that sends), moving
    (requests to take in), prompts (how many to start).

    Says its address, reads the keys of what was sent to it, says what became of all requests.
    """
    orders = json.loads(Path(orders_file).read_text())
    engine = make_engine(orders["kind"], Path(orders["model"]))
    engine.load_weights(orders["version"], Path(orders["weights"]), None)
    driver = Driver(engine)
    with a_plane(Path(orders["snapshots"]), 2, (orders["transport"],), fingerprint=orders["fingerprint"]) as end:
        for ticket in orders["moving"]:
            end.plane.expect(ticket, 1, 1 << 30)
        print(end.address, flush=True)
        for key in json.loads(sys.stdin.readline()):
            snapshot = end.plane.take(key)
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
