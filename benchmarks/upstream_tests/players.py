"""Stand-ins of what NeMo RL's rollout tests need beside rollouts: a tokenizer, a cluster, a model.

The model is scripted: it solves the calculator's problems with the calls that the prompt describes.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from ratchet.experience.nemo_rl import BatchedDataDict

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 2600  # a prompt of the calculator is then about as long as for the tests' own model
OPERATIONS = {"+": "sum", "-": "diff", "*": "prod", "/": "div"}
PROBLEM = re.compile(r"Solve: \((\d+) (.) (\d+)\) (.) (\d+)")


class AutoTokenizer:
    """A byte-level tokenizer that is trained on the tests' own text."""

    corpus = ""

    @classmethod
    def from_pretrained(cls, name: str, **_: Any) -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
        trainer = BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(cls.corpus.splitlines(keepends=True), trainer)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        fast.chat_template = TEMPLATE
        VllmGeneration.tokenizer = fast
        return fast


class LocalMethod:
    """A method of an actor in this process."""

    def __init__(self, function: Any) -> None:
        self.remote = self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class LocalActor:
    """An object of this process behind the interface of an actor."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> Any:
        return LocalMethod(getattr(self._instance, name))


def _make_remote(target: Any) -> Any:
    """Return a class whose `remote` makes an actor, or a function that has `remote`."""
    if isinstance(target, type):
        kind: Any = target
        kind.remote = classmethod(lambda cls, *args, **kwargs: LocalActor(cls(*args, **kwargs)))
        kind.options = classmethod(lambda cls, **_: cls)
        return kind
    target.remote = target
    return target


def make_ray() -> ModuleType:
    """Return a module in place of ray: actors are objects of this process.

    Ratchet's own tests step real actors.
    """
    ray: Any = ModuleType("ray")
    ray.__path__ = []  # a package, so that its modules can be imported
    ray.remote = lambda *args, **_: _make_remote(args[0]) if args else _make_remote
    ray.kill = ray.init = ray.shutdown = lambda *_, **__: None
    ray.get = lambda value, **_: value
    return ray


class RayVirtualCluster:
    """A cluster without accelerators."""

    def __init__(self, **_: Any) -> None: ...

    def shutdown(self) -> None: ...


def solve(text: str) -> str:
    """Return the next call of the calculator, or the result of the last one."""
    match = next(iter(PROBLEM.finditer(text)), None)
    if match is None:
        return "?"
    results = re.findall(r"<result>([-\d.]+)</result>", text[match.end() :])
    first, inner, second, outer, third = match.groups()
    if not results:
        return f"[{first}, {second}, {OPERATIONS[inner]}]<call: calculator>"
    if len(results) == 1:
        return f"[{results[0]}, {third}, {OPERATIONS[outer]}]<call: calculator>"
    return results[-1]


class VllmGeneration:
    """A generator of NeMo RL's interface whose answers are scripted."""

    tokenizer: Any = None

    def __init__(self, cluster: Any, config: dict[str, Any]) -> None:
        self.cfg = config

    def prepare_for_generation(self, *_: Any, **__: Any) -> bool:
        return True

    finish_generation = shutdown = prepare_for_generation

    def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict[Any]:
        tokenizer, rows = self.tokenizer, []
        for ids, length in zip(data["input_ids"], data["input_lengths"], strict=True):
            prompt = ids[: int(length)].tolist()
            text = solve(tokenizer.decode(prompt))
            answer = tokenizer(text, add_special_tokens=False)["input_ids"]
            if not text.endswith("<call: calculator>"):  # a stop string ends the others
                answer = [*answer, tokenizer.eos_token_id]
            rows.append((prompt, answer[: self.cfg["max_new_tokens"]]))
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        output_ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
        logprobs = torch.zeros(len(rows), longest)
        for row, (prompt, answer) in enumerate(rows):
            output_ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            logprobs[row, len(prompt) : len(prompt) + len(answer)] = -0.5
        return BatchedDataDict(
            {
                "output_ids": output_ids,
                "logprobs": logprobs,
                "generation_lengths": torch.tensor([len(answer) for _, answer in rows]),
                "unpadded_sequence_lengths": torch.tensor([len(p) + len(a) for p, a in rows]),
            }
        )

    async def generate_async(
        self, data: Any, greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[Any]]]:
        yield 0, self.generate(data, greedy)
