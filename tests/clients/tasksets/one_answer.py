"""A taskset of verifiers whose tasks any harness can run."""

import verifiers.v1 as vf


class Answer(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class AnswerTaskset(vf.Taskset[Answer, vf.TasksetConfig]):
    def load(self):
        for number in range(3):
            yield Answer(vf.TaskData(prompt=f"abc {number}"), self.config.task)


__all__ = ["AnswerTaskset"]
