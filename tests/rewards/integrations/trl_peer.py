"""TRL's own GRPOTrainer, on answers that are given: `python trl_peer.py job.json` prints its rewards.

A job has `rewards` (paths of functions) or `environment` (the path of a class), and `rows`: each
with the columns of a row in `row`, and in `turns` what the policy says, turn by turn. The model and
its tokenizer are written to `directory`.
"""

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def load(path):
    """The object at "file.py:name", or at "module:name"."""
    module, _, name = path.rpartition(":")
    if not module.endswith(".py"):
        return getattr(__import__(module, fromlist=[name]), name)
    spec = spec_from_file_location(Path(module).stem, module)
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def make_model(directory):
    """A tiny model with random weights, with the chat template of Qwen3."""
    import torch
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens = {token: i for i, token in enumerate([*SPECIAL, *sorted(alphabet)])}
    backend = Tokenizer(models.BPE(tokens, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[2], pad_token=SPECIAL[0],
        additional_special_tokens=SPECIAL[1:2],
    )  # fmt: skip
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=4096, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return tokenizer


def main(job):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    directory = job["directory"]
    tokenizer = make_model(directory)
    rows = [entry["row"] for entry in job["rows"]]
    functions = [load(path) for path in job["rewards"]]
    functions += [load(path)(**keys) for path, keys in job.get("made", [])]
    environment = job.get("environment")
    args = GRPOConfig(
        output_dir=directory, per_device_train_batch_size=len(rows), num_generations=len(rows),
        max_completion_length=2048, max_steps=1, report_to=[], use_cpu=True, bf16=False,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=directory, reward_funcs=functions, args=args, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, environment_factory=environment and load(environment),
    )  # fmt: skip
    told = []
    says = [list(entry["turns"]) for entry in job["rows"]]
    waiting = list(range(len(rows)))

    def generate(prompt_ids, *args, **kwargs):
        """The next turns of the attempts that go on: all at first, then those that called."""
        nonlocal waiting
        assert len(prompt_ids) == len(waiting)
        turns = [says[i].pop(0) for i in waiting]
        waiting = [i for i, text in zip(waiting, turns, strict=True) if "<tool_call>" in text]
        return [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in turns], None

    def record(inputs, prompts, completions, completion_ids):
        rewards = calculate(inputs, prompts, completions, completion_ids)
        told.append([prompts, completions, completion_ids, rewards.tolist()])
        return rewards

    calculate, trainer._calculate_rewards = trainer._calculate_rewards, record
    trainer._generate_single_turn = generate
    trainer._generate_and_score_completions(rows)
    (seen,) = told
    names = ("prompts", "completions", "completion_ids", "rewards")
    return dict(zip(names, seen, strict=True)) | {"names": trainer.reward_func_names}


if __name__ == "__main__":
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    sys.stdout.write(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
