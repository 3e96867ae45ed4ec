"""Time Ratchet's embedded engine on the workload of ../peers/hf_generate.py.

Arguments and output are the same as there.
"""

from __future__ import annotations

import common
import protocol

options = common.start(protocol.generation_arguments("generation with Ratchet's engine"))

import torch
from arithmetic import forest

import ratchet as rt
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine


def main() -> None:
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = rt.load_policy(options.model, device=options.device, dtype=dtype)
    tokenizer = rt.load_tokenizer(options.model)
    special = set(tokenizer.special_ids.values())
    rows = protocol.generation_workload(
        options, [i for i in range(tokenizer.vocab_size) if i not in special]
    )
    slots = options.slots or len(rows)
    engine = EmbeddedEngine(EngineConfig(max_running=slots), model)
    prompts = [row.prompt for row in rows]
    samplings = [rt.Sampling(max_new_tokens=row.new_tokens, seed=i) for i, row in enumerate(rows)]

    def generate() -> None:
        completions = engine.generate_all(prompts, samplings)
        lengths = [len(completion.tokens) for completion in completions]
        assert lengths == [row.new_tokens for row in rows]
        common.synchronize(options)

    n_new_tokens = sum(row.new_tokens for row in rows)
    answers: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        answers.setdefault(row.prompt, []).append(row.new_tokens)
    shape, work = (
        model.decoder.config,
        forest((len(prompt), lengths) for prompt, lengths in answers.items()),
    )
    protocol.emit_generation(
        options,
        rows,
        generate,
        **common.facts(options),
        gflop=work.forward_gflop(shape),
        gbytes=work.decoding_gbytes(shape, reads=n_new_tokens / slots, bytes_each=dtype.itemsize),
    )


main()
