"""A taskset of verifiers without an end."""

import itertools

import verifiers.v1 as vf


class EndlessTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield vf.Task(vf.TaskData(prompt=f"Say {number}."), self.config.task)


__all__ = ["EndlessTaskset"]
