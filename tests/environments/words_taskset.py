"""A taskset of the package verifiers, as its users write them: words to be spelt backwards, one
letter a turn, or at once."""

import verifiers.v1 as vf

WORDS = [a + b for a in ("ba", "do", "fi", "gu") for b in ("ck", "lt", "mp", "nd", "rs", "st")] + [
    "deaf"
]


class WordsConfig(vf.TasksetConfig):
    turns: bool = False


class WordsData(vf.TaskData):
    word: str


class WordsTask(vf.Task[WordsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def backwards(self, trace: vf.Trace) -> float:
        return float(
            "".join(m.content or "" for m in trace.assistant_messages) == self.data.word[::-1]
        )

    @vf.reward(weight=0.5)
    async def lower_case(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.islower())

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.stop
    async def shouted(self, trace: vf.Trace) -> bool:
        return trace.last_reply.endswith("!")


class WordsTaskset(vf.Taskset[WordsTask, WordsConfig]):
    def load(self):
        for word in WORDS:
            data = WordsData(
                prompt=f"Spell {word} backwards.", system_prompt="Be brief.", word=word
            )
            yield WordsTask(data, self.config.task)


class WordsEnvConfig(vf.EnvConfig):
    speller: vf.AgentConfig = vf.AgentConfig()


class WordsEnv(vf.Env[WordsEnvConfig]):
    """Asks for one letter after the other, where the taskset says so; of "deaf" even after it was
    told that it is over."""

    async def run(self, task, agents):
        if not self.taskset.config.turns:
            await agents.speller.run(task)
            return
        async with agents.speller.interaction(task) as talk:
            segment = await talk.turn()
            for place in range(2, len(task.data.word) + 1):
                if segment.terminated or segment.last_reply == "raise":
                    break
                segment = await talk.turn(f"Letter {place}?")
                if segment.terminated and task.data.word == "deaf":
                    await talk.turn("Hello?")
            if segment.last_reply == "raise":
                raise RuntimeError("as asked")
        if segment.terminated:
            talk.trace.record_metric("cut", 1.0)


__all__ = ["WordsEnv", "WordsTaskset"]
