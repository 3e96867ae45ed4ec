"""An environment of Atropos: two turns, scored by the letters "a" of both answers."""

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup


class Letters(BaseEnv):
    name = "letters"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(max_token_length=64), []

    async def setup(self):
        self.n_drawn = 0

    async def get_next_item(self):
        self.n_drawn += 1
        return {"word": f"word {self.n_drawn}"}

    async def evaluate(self, *args, **kwargs):
        return

    async def collect_trajectories(self, item):
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for _ in range(self.config.group_size):
            messages = [{"role": "user", "content": item["word"]}]
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                for _ in range(2):
                    completion = await managed.chat_completion(messages=messages, max_tokens=8)
                    text = completion.choices[0].message.content
                    messages.append({"role": "assistant", "content": text})
                    messages.append({"role": "user", "content": "again"})
                (node,) = managed.get_state()["nodes"]
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["scores"].append(sum(m["content"].count("a") for m in messages[1::2]))
        return group, []
