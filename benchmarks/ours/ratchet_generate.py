"""Times Ratchet's embedded engine on the workload of ../peers/hf_generate.py; same arguments and output."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "peers"))
import protocol

parser = protocol.arguments("generation with Ratchet's engine")
parser.add_argument("--ragged", action="store_true", help="prompts and completions of different lengths")
options = parser.parse_args()
protocol.quiet_offline(options.threads)

import torch

import ratchet as rt
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import Engine

torch.set_num_threads(options.threads)


def main() -> None:
    model, tokenizer = rt.load_policy(options.model), rt.load_tokenizer(options.model)
    special = set(tokenizer.special_ids.values())
    rows = protocol.workload(
        [i for i in range(tokenizer.vocab_size) if i not in special],
        prompts=options.prompts,
        group_size=options.group_size,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        ragged=options.ragged,
        seed=options.seed,
    )
    engine = Engine(EngineConfig(), model)
    prompts = [row.prompt for row in rows]
    samplings = [rt.Sampling(max_new_tokens=row.new_tokens, seed=i) for i, row in enumerate(rows)]
    seconds: list[float] = []
    startup_s = 0.0
    for _ in range(options.warmup + options.steps):
        start = time.perf_counter()
        made = engine.generate_all(prompts, samplings)
        seconds.append(time.perf_counter() - start)
        startup_s = startup_s or time.perf_counter() - protocol.STARTED
        assert [len(completion.tokens) for completion in made] == [row.new_tokens for row in rows]
    timed = seconds[options.warmup :]
    useful = sum(row.new_tokens for row in rows)
    protocol.emit(
        options,
        timed,
        peer="ratchet",
        version=rt.__version__,
        torch=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        case="generate",
        useful_tokens=useful,
        startup_s=round(startup_s, 2),
    )


main()
