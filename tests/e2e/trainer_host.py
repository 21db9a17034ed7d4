"""A trainer that publishes the model itself. ``python -m tests.e2e.trainer_host ADDRESS MODEL STEPS GROUPS``.

STEPS 0: until its stdin ends. The token is in DORA_TOKEN. It prints the ids of the groups of each step, as
``dora.trainers.grpo --json`` does.
"""

import asyncio
import json
import os
import sys

import dora


async def main(address: str, model: str, steps: int, groups: int) -> None:
    enough = asyncio.create_task(asyncio.to_thread(sys.stdin.read)) if not steps else None
    async with dora.Trainer(address, token=os.environ["DORA_TOKEN"]) as trainer:
        async for step in trainer.steps(groups=groups):
            taken = [group.group_id async for group in step]
            await step.commit(weights=model, wait=True)
            print(json.dumps({"step": step.number, "group_ids": taken}), flush=True)
            if step.number + 1 == steps or (enough is not None and enough.done()):
                return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
