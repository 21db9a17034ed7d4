"""A taskset of verifiers whose reward fails."""

import verifiers.v1 as vf


class Answer(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def none(self, trace: vf.Trace) -> float:
        raise RuntimeError("no reward today")


class AnswerTaskset(vf.Taskset[Answer, vf.TasksetConfig]):
    def load(self):
        yield Answer(vf.TaskData(prompt="abc"), self.config.task)


__all__ = ["AnswerTaskset"]
