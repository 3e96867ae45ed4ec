"""A taskset of verifiers whose reward looks into the box that the agent worked in."""

import verifiers.v1 as vf


class BoxedTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def left_a_file(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0


class BoxedTaskset(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    def load(self):
        yield BoxedTask(vf.TaskData(prompt="Leave a file."), self.config.task)


__all__ = ["BoxedTaskset"]
