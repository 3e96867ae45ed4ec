"""Time `generate` of Hugging Face transformers on a batch of prompts.

See protocol.py for the arguments. By default all rows have equal prompt lengths and numbers of new
tokens. With `--ragged` they differ; `generate` then pads prompts on the left, and a row that has
ended stays in its batch until the longest row ends. `--slots` is the number of rows in a batch.

Sampling is at temperature 1 without filters, which is cheapest. No end-of-text id is set, so lengths
are exact without a logits processor. Tokens per second count requested tokens only.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import protocol

options = protocol.generation_arguments("transformers generate").parse_args()
protocol.quiet_offline(options.threads)
warnings.filterwarnings("ignore")

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria

torch.set_num_threads(options.threads)


class RowLimits(StoppingCriteria):
    """A criterion that ends each row after its own number of new tokens.

    limits_B: number of new tokens of each of the B rows.
    """

    def __init__(self, prompt_width: int, limits_B: torch.Tensor) -> None:
        self.prompt_width = prompt_width
        self.limits_B = limits_B

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] - self.prompt_width >= self.limits_B


def pad_prompts(rows: Sequence[protocol.Row], pad: int) -> dict[str, torch.Tensor]:
    """Return the ids and mask [rows, width] of the prompts, padded on the left."""
    width = max(len(row.prompt) for row in rows)
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row.prompt) :] = torch.tensor(row.prompt)
        mask[i, width - len(row.prompt) :] = 1
    return {"input_ids": ids.to(options.device), "attention_mask": mask.to(options.device)}


def generate(model: Any, rows: Sequence[protocol.Row], pad: int) -> None:
    inputs = pad_prompts(rows, pad)
    width, longest = inputs["input_ids"].shape[1], max(row.new_tokens for row in rows)
    limits = RowLimits(width, torch.tensor([row.new_tokens for row in rows], device=options.device))
    extra: dict[str, Any] = {"stopping_criteria": [limits]} if options.ragged else {}
    with torch.inference_mode():
        output = model.generate(**inputs, **extra, max_new_tokens=longest)
    assert tuple(output.shape) == (len(rows), width + longest), f"generated {tuple(output.shape)}"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = torch.bfloat16 if protocol.is_bfloat16(options) else torch.float32
    model = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=pad, eos_token_id=None
    )
    rows = protocol.generation_workload(
        options, [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    )
    size = options.slots or len(rows)
    torch.manual_seed(options.seed)

    def generate_all() -> None:
        for first in range(0, len(rows), size):
            generate(model, rows[first : first + size], pad)
        if options.device != "cpu":
            torch.cuda.synchronize(options.device)

    protocol.emit_generation(
        options,
        rows,
        generate_all,
        peer="transformers",
        version=transformers.__version__,
        torch=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        parameters=model.num_parameters(),
    )


if __name__ == "__main__":
    main()
