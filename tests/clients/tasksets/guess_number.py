"""A taskset of verifiers of several turns: the policy guesses a number, and is told whether it is higher."""

import re

import verifiers.v1 as vf

GUESSES = 2


class Data(vf.TaskData):
    number: int


class Guess(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def digits(self, trace: vf.Trace) -> float:
        """The share of replies that have a digit."""
        replies = [message.content or "" for message in trace.assistant_messages]
        return sum(bool(re.search(r"\d", each)) for each in replies) / max(len(replies), 1)

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: Guess, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(GUESSES - 1):
                if segment.terminated or str(task.data.number) in segment.last_reply:
                    return
                segment = await interaction.turn("Higher.")


class GuessTaskset(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for number in range(3):
            yield Guess(Data(prompt=f"abc {number}", number=1000 + number), self.config.task)


__all__ = ["GuessEnv", "GuessTaskset"]
