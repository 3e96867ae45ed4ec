"""Times `generate` of Hugging Face transformers on a batch of prompts. See protocol.py for the arguments.

Even: every row has the same prompt length and the same number of new tokens. `--ragged`: lengths differ, as real prompts and
answers do; `generate` pads prompts on the left, and a row that has ended is carried along until the longest one ends.
Sampling is at temperature 1 without filters, the cheapest there is. No end-of-text id is set: lengths are exact without a
logits processor. Tokens per second count useful tokens only.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import protocol

parser = protocol.arguments("transformers generate")
parser.add_argument("--ragged", action="store_true", help="rows differ in prompt and completion length")
options = parser.parse_args()
protocol.quiet_offline(options.threads)
warnings.filterwarnings("ignore")

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria

torch.set_num_threads(options.threads)


class RowLimits(StoppingCriteria):
    """Ends each row after its own number of new tokens."""

    def __init__(self, prompt_width: int, limits_B: torch.Tensor) -> None:
        self.prompt_width = prompt_width
        self.limits_B = limits_B

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] - self.prompt_width >= self.limits_B


def padded(rows: list[protocol.Row], pad: int) -> dict[str, torch.Tensor]:
    """Prompts padded on the left to the longest: ids and mask, [rows, width]."""
    width = max(len(row.prompt) for row in rows)
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row.prompt) :] = torch.tensor(row.prompt)
        mask[i, width - len(row.prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    rows = protocol.workload(
        [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids],
        prompts=options.prompts,
        group_size=options.group_size,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        ragged=options.ragged,
        seed=options.seed,
    )
    inputs = padded(rows, pad)
    width, longest = inputs["input_ids"].shape[1], max(row.new_tokens for row in rows)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, pad_token_id=pad, eos_token_id=None
    )
    limits = RowLimits(width, torch.tensor([row.new_tokens for row in rows]))
    extra: dict[str, Any] = {"stopping_criteria": [limits]} if options.ragged else {}
    torch.manual_seed(options.seed)
    seconds: list[float] = []
    startup_s = 0.0
    for _ in range(options.warmup + options.steps):
        start = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(**inputs, **extra)
        seconds.append(time.perf_counter() - start)
        startup_s = startup_s or time.perf_counter() - protocol.STARTED
        assert tuple(made.shape) == (len(rows), width + longest), f"generated {tuple(made.shape)}"
    timed = seconds[options.warmup :]
    useful = sum(row.new_tokens for row in rows)
    protocol.emit(
        options,
        timed,
        peer="transformers",
        version=transformers.__version__,
        torch=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        case="generate",
        parameters=model.num_parameters(),
        useful_tokens=useful,
        tokens_per_s=round(useful / statistics.median(timed), 1),
        startup_s=round(startup_s, 2),
    )


if __name__ == "__main__":
    main()
