"""The pure core: ``Machine.handle(event, now_s) -> commands``.

No clock, randomness, I/O, torch or vLLM in here. The service and the simulator drive the same object.

    event ──▶ machine ──▶ lifecycle   prompts, groups, scores, steps      (what is generated and delivered)
                      ──▶ fleet       workers, versions, loads            (where it can run)
                      ──▶ handoffs    one live request between workers    (table in handoff.py)
                      ──▶ balance     triggers, applies a policy's plan   (partition.py, migration.py, policies/)
"""

from dora.core.machine import Machine

__all__ = ["Machine"]
