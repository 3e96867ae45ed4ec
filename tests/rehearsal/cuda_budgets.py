"""Budgets of kernels, copies and waits, and the table of docs/accelerators.md."""

import asyncio
import re
from pathlib import Path

import pytest
import torch
from rehearsal.cuda_learners import CASES, make_learner, update
from rehearsal.device_counts import Counts, decode, make_policy, make_table, measure
from rehearsal.device_counts import update as count_update
from support.pretend_cuda.counting import counting

from ratchet.models.load import load_transformers_policy
from ratchet.models.weights.checksums import copy_with_checksum

PAGE = Path(__file__).parents[2] / "docs" / "accelerators.md"


@pytest.fixture(scope="module")
def rows():
    return measure()


def test_the_page_has_the_counts(rows):
    table = make_table(rows)
    assert table in PAGE.read_text(encoding="utf-8"), f"put this into {PAGE.name}:\n{table}"


def test_the_page_has_a_state_for_every_fault():
    rows = re.findall(
        r"^\| ([CLS]\d+) .*?\| (.*?) \| .+ \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    letters = {"C": 8, "L": 6, "S": 13}
    expected = [f"{letter}{i + 1}" for letter, count in letters.items() for i in range(count)]
    assert [fault for fault, _ in rows] == expected
    assert {state for _, state in rows} <= {
        "mended",
        "mended in part",
        "stated",
        "open",
        "no fault",
    }


def test_a_decoding_step_waits_only_to_see_stop_ids(rows):
    waits = {name: counts.sync for name, counts in rows.items()}
    assert waits["Decoding step of 128 requests, 2 layers"] == 0
    assert waits["the same with stop ids"] == 1
    assert waits["the same with top-p, top-k and min-p"] == 0
    assert rows["each further layer"].kernel <= 26
    assert rows["A replayed step"] == Counts(kernel=1, copy=0, sync=0)
    assert rows["a replayed step with stop ids"] == Counts(kernel=1, copy=1, sync=1)
    assert decode(6).count("sync") == 2, "in the step in which its requests end"


def test_micro_batches_wait_for_nothing(rows):
    assert rows["GRPO update of one micro-batch, 2 layers"].sync == 1, "its metrics"
    assert rows["each further micro-batch"].sync == 0
    assert rows["each further micro-batch"].copy <= 5


@pytest.mark.parametrize("name", ["ppo with a critic", "lora with dropout", "muon", "sft"])
def test_an_update_of_any_kind_waits_once(name):
    learner = make_learner(CASES[name], "cuda:0")
    update(learner, CASES[name], [0])
    batch, terms = CASES[name].batch(1)
    with counting() as events:
        asyncio.run(learner.update(batch, terms))
    assert events.count("sync") == 1, events.describe("sync")
    with counting() as events:
        asyncio.run(learner.score(batch, ["logprobs"]))
    assert events.count("sync") == 1, events.describe("sync")


def test_a_weight_leaves_the_accelerator_in_one_copy():
    weight = torch.randn(1024, 1024, device="cuda:0")
    target_n = torch.empty(weight.numel() * 2, dtype=torch.uint8)
    with counting() as events:
        copy_with_checksum(target_n, weight, torch.bfloat16)
    assert events.count("sync") == 1, events.describe("sync")
    assert torch.equal(target_n.view(torch.bfloat16).view(weight.shape), weight.cpu().bfloat16())


@pytest.mark.parametrize("count", [lambda: decode(2), lambda: count_update(2)])
def test_attention_never_keeps_the_scores_of_all_pairs(count):
    operations = {operation for _, operation, _ in count().counts}
    assert any(operation.endswith("attention") for operation in operations)
    assert "math attention" not in operations


def test_packed_sequences_of_transformers_use_flash_attention(tmp_path):
    """A mask of all pairs of the micro-batch's tokens would rule it out."""
    make_policy(2).save(tmp_path)
    policy = load_transformers_policy(tmp_path, device="cuda:0")
    lengths = [5, 12, 5, 30]
    tokens = torch.arange(sum(lengths), device="cuda:0") % 60
    positions = torch.cat([torch.arange(length, device="cuda:0") for length in lengths])
    with torch.autocast("cuda", torch.bfloat16), counting() as events:
        policy.hidden(tokens, positions, lengths)
    operations = {name for _, name, _ in events.counts if "attention" in name}
    assert operations == {"flash attention"}
