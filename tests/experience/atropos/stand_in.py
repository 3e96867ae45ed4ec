"""Environments with the shape of Atropos's `BaseEnv`, without the package."""

import sys
from types import ModuleType, SimpleNamespace

from experience.openai_proxy.talk import RENDERER
from pydantic import BaseModel


def install(patch):
    """Make the one name of atroposlib that Ratchet imports importable."""
    names = ("atroposlib", "atroposlib.envs", "atroposlib.envs.server_handling")
    for name in (*names, f"{names[-1]}.server_baseline"):
        module = ModuleType(name)
        module.__path__ = []
        patch.setitem(sys.modules, name, module)
    module.APIServerConfig = SimpleNamespace


SAID = {"role": "user", "content": "hello"}
(LETTER,) = RENDERER.tokenizer.encode("a")


class Config(BaseModel):
    group_size: int = 4
    n_items: int = 5
    flaw: str = ""
    use_wandb: bool = True
    data_path_to_save_groups: str | None = "groups.jsonl"


class ServerManager:
    """As Atropos's, it forwards each call to one of its servers."""

    def __init__(self):
        self.servers = []

    async def chat_completion(self, **fields):
        return await self.servers[0].chat_completion(**fields)

    async def completion(self, **fields):
        return await self.servers[0].completion(**fields)

    async def tokens_and_logprobs_completion(self, **fields):
        return await self.servers[0].tokens_and_logprobs_completion(**fields)


class Tokenizer:
    def encode(self, text, add_special_tokens=True):
        return RENDERER.tokenizer.encode(text)


class Letters:
    """Its score is the number of letters "a" in an answer."""

    tokenizer = Tokenizer()

    def __init__(self, config, server_configs, slurm, testing):
        self.config, self.server, self.n_drawn = config, ServerManager(), 0

    @classmethod
    def config_init(cls):
        return Config(), []

    async def setup(self):
        self.words = [f"word {i}" for i in range(self.config.n_items)]

    async def get_next_item(self):
        self.n_drawn += 1
        return {"word": self.words[(self.n_drawn - 1) % len(self.words)]}

    async def collect_trajectories(self, item):
        flaw = self.config.flaw
        if flaw == "raises":
            raise OSError("the judge is down")
        if flaw == "cold":
            try:
                await self.server.chat_completion(messages=[SAID], temperature=0.5)
            except Exception:
                return None, []
        prompt = RENDERER.tokenizer.encode(f"<user>{item['word']}<assistant>")
        _, answers, logprobs, reasons = await self.server.tokens_and_logprobs_completion(
            input_ids=prompt, n=self.config.group_size, temperature=1.0, split="train"
        )
        assert [len(answer) for answer in answers] == [len(values) for values in logprobs]
        assert set(reasons) == {"stop"}
        group = {
            "tokens": [prompt + answer for answer in answers],
            "masks": [[-100] * len(prompt) + answer for answer in answers],
            "scores": [float(answer.count(LETTER)) for answer in answers],
            "advantages": [],
        }
        FLAWS.get(flaw, lambda group: None)(group)
        if flaw == "changes":
            item["word"] += "!"
        return (None if flaw == "drops" else group), ([item] if flaw == "backlog" else [])

    async def postprocess_histories(self, group):
        return group


FLAWS = {
    "short": lambda group: group["scores"].pop(),
    "named": lambda group: group.update(scores=dict(enumerate(group["scores"]))),
    "nan": lambda group: group["scores"].__setitem__(0, float("nan")),
    "foreign": lambda group: group["tokens"][0].__setitem__(-2, 1),
    "twice": lambda group: [
        group[name].__setitem__(0, group[name][1]) for name in group if group[name]
    ],
    "mask": lambda group: group["masks"][0].__setitem__(0, 60),
    "unmasked": lambda group: group["masks"].__setitem__(0, [-100] * len(group["tokens"][0])),
    "advantages": lambda group: group.update(advantages=[[1.0]]),
    "overrides": lambda group: group.update(overrides=[{"set_advantage_to_zero": True}]),
}


class Chats(Letters):
    """It retokenizes its chats, with a newline of the template after the end of a turn."""

    async def collect_trajectories(self, item):
        messages = [{"role": "user", "content": item["word"]}]
        completion = await self.server.chat_completion(
            messages=messages, n=self.config.group_size, max_tokens=8
        )
        texts = [choice.message.content for choice in completion.choices]
        prompt = RENDERER.prompt(messages_of(item["word"]))
        return score_lengths(prompt, texts, after_end="\n"), []


class Texts(Letters):
    """It asks for continuations of a text."""

    async def collect_trajectories(self, item):
        prompt = f"<user>{item['word']}<assistant>"
        completion = await self.server.completion(
            prompt=prompt, n=self.config.group_size, max_tokens=8
        )
        texts = [choice.text for choice in completion.choices]
        return score_lengths(RENDERER.tokenizer.encode(prompt, allow_special=True), texts), []


def score_lengths(prompt, texts, after_end=""):
    encode = RENDERER.tokenizer.encode
    tails = [[*encode(text), RENDERER.stop_ids[0], *encode(after_end)] for text in texts]
    return {
        "tokens": [[*prompt, *tail] for tail in tails],
        "masks": [[-100] * len(prompt) + tail for tail in tails],
        "scores": [float(len(text)) for text in texts],
    }


def messages_of(word):
    from ratchet.types import Message

    return [Message("user", word)]
