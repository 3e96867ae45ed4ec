"""A taskset of verifiers whose tasks need a container."""

import verifiers.v1 as vf


class BoxedTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    NEEDS_CONTAINER = True


class BoxedTaskset(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    def load(self):
        yield BoxedTask(vf.TaskData(prompt="Leave a file."), self.config.task)


__all__ = ["BoxedTaskset"]
