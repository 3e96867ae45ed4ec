"""A taskset of verifiers with a tool server, state of a rollout, and hooks that need a runtime."""

import verifiers.v1 as vf


class CountState(vf.State):
    count: int = 0


class CountToolset(vf.Toolset[vf.ToolsetConfig, CountState]):
    @vf.tool
    async def add(self, number: int) -> str:
        """Adds a number to the count."""
        if number == 13:
            raise ValueError("13 is not added")
        self.state.count += number
        return f"The count is {self.state.count}."


class CountData(vf.TaskData):
    goal: int


class CountTask(vf.Task[CountData, CountState, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [CountToolset(vf.ToolsetConfig())]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.goal == 666:
            raise RuntimeError("no box")
        await runtime.write("goal.txt", str(self.data.goal).encode())

    @vf.reward
    async def reached(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        goal = (await runtime.read("goal.txt")).decode()
        return float(str(trace.state.count) == goal)


class CountTaskset(vf.Taskset[CountTask, vf.TasksetConfig]):
    def load(self):
        for goal in (*range(2, 30), 666):
            data = CountData(prompt=f"Count to {goal}.", system_prompt="Be brief.", goal=goal)
            yield CountTask(data, self.config.task)


__all__ = ["CountTaskset"]

if __name__ == "__main__":
    CountToolset.run()
