"""The pure core: ``Machine.handle(event, now_s) -> commands``.

No clock, randomness, I/O, torch or vLLM in here. The service and the simulator drive the same object.

    event ──▶ machine ──▶ rules/      admission, lifecycle, membership, handoff, rejection, ...
                      ──▶ scheduler   runs after every event until nothing is left to do
                      ──▶ balance     triggers, applies a policy's plan (policies/)

The rules are functions over ``state``, which is made of groups/, fleet/, handoff/ and forecast/.
"""

from dora.core.machine import Machine

__all__ = ["Machine"]
