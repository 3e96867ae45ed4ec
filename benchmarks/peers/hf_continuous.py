"""Time the continuous batching of Hugging Face transformers on the workload of hf_generate.py.

Arguments and output are the same as there.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import protocol

options = protocol.generation_arguments("transformers continuous batching").parse_args()
protocol.quiet_offline(options.threads)
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)

torch.set_num_threads(options.threads)
# Size of the KV cache: more than the workloads here need. Without a limit it would take most of the
# memory.
CACHE_TOKENS = 2**17


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = torch.bfloat16 if protocol.is_bfloat16(options) else torch.float32
    model: Any = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    )
    rows = protocol.generation_workload(
        options, [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    )
    slots = options.slots or len(rows)
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=-1
    )
    page = ContinuousBatchingConfig().page_size
    batching = ContinuousBatchingConfig(
        num_blocks=CACHE_TOKENS // page,
        max_batch_tokens=max(512, slots),
        max_requests_per_batch=slots,
        seed=options.seed,
    )

    def generate() -> None:
        with model.continuous_batching_context_manager(
            sampling, continuous_batching_config=batching
        ) as manager:
            new_tokens_by_request = {
                manager.add_request(list(row.prompt), max_new_tokens=row.new_tokens): row.new_tokens
                for row in rows
            }
            while new_tokens_by_request:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    protocol.unavailable(
                        f"continuous batching of transformers {transformers.__version__} ended "
                        "early"
                    )
                if result is not None and result.is_finished():
                    expected = new_tokens_by_request.pop(result.request_id)
                    assert len(result.generated_tokens) == expected

    protocol.emit_generation(
        options,
        rows,
        generate,
        peer="transformers",
        version=transformers.__version__,
        torch=torch.__version__,
    )


if __name__ == "__main__":
    main()
