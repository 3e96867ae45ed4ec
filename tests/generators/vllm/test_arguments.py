"""`generator.arguments` without vLLM; its own parser is in `test_vllm_real.py`."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from ratchet.config.loader import load_config
from ratchet.errors import ConfigError
from ratchet.generators.config import VLLMConfig
from ratchet.generators.vllm import arguments
from ratchet.generators.vllm.arguments import check_arguments, is_speculative
from ratchet.generators.vllm.worker_extension import (
    VLLMWorkerExtension,
    count_at_least,
    expand_to_tokens,
)
from ratchet.training.preflight import run_preflight

RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
generator: {kind: workers, worker: {kind: vllm, arguments: {kv_cache_dtype: fp9}}}
algorithm: {kind: grpo}
environment: {kind: arithmetic}
device: cpu
"""


@pytest.mark.parametrize(
    ("refused", "fix"),
    [
        ({"max_num_seqs": 8}, "Set generator.max_running instead"),
        ({"seed": 3}, "Set seed instead"),
        ({"load_format": "dummy"}, "loads no others. Remove it"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode can't be set"),
        ({"speculative_config": {"rejection_sample_method": "synthetic"}}, "synthetic"),
        ({"speculative_config": {"synthetic_acceptance_length": 2.0}}, "synthetic"),
        ({"speculative_config": {"method": "mtp"}}, "mtp drafts by layers .* Add model: the"),
        ({"spec_method": "deepseek_mtp"}, "deepseek_mtp drafts by layers"),
    ],
)
def test_what_ratchet_sets_itself_is_refused(refused, fix):
    with pytest.raises(ValidationError, match=fix):
        VLLMConfig(arguments=refused)


def test_speculation_is_recognised_in_each_of_its_forms():
    assert is_speculative({"speculative_config": {"method": "ngram"}})
    assert is_speculative({"spec_method": "ngram", "spec_tokens": 2})
    assert not is_speculative({"kv_cache_dtype": "fp8", "speculative_config": None})


@pytest.fixture
def vllm_says(monkeypatch):
    """What the process that imports vLLM answers, and what it got."""
    inputs = []

    def set_answer(stdout, code=0):
        def run(command, *, input, **options):
            inputs.append(json.loads(input))
            return subprocess.CompletedProcess(command, code, stdout, "no such file")

        monkeypatch.setattr(arguments, "find_spec", lambda name: True)
        monkeypatch.setattr(subprocess, "run", run)
        return inputs

    return set_answer


def test_preflight_checks_the_arguments_by_vllm(tmp_path, vllm_says):
    inputs = vllm_says('a warning\n"generator.arguments.kv_cache_dtype: refused"\n')
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    report = run_preflight(load_config(tmp_path / "recipe.yaml"))
    assert inputs == [{"kv_cache_dtype": "fp9"}]
    with pytest.raises(ConfigError, match="kv_cache_dtype: refused"):
        report.raise_problems()


def test_a_vllm_that_cannot_be_imported_is_an_error(vllm_says):
    vllm_says("", 1)
    with pytest.raises(ConfigError, match="can't be imported: no such file"):
        check_arguments({"kv_cache_dtype": "fp8"})


def test_nothing_is_checked_without_arguments_or_without_vllm(vllm_says, monkeypatch):
    inputs = vllm_says('""')
    check_arguments({})
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    check_arguments({"kv_cache_dtype": "fp8"})
    assert inputs == []


def test_drafted_tokens_get_the_value_of_their_request():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    temperatures = torch.tensor([0.5, 7.0, 0.0])
    assert expand_to_tokens(temperatures, ends, 5, replace_from=0, replace_to=1).tolist() == [
        *(0.5, 0.5),
        *(1.0, 1.0, 1.0),
    ]
    top_k = torch.tensor([4, 5, 6], dtype=torch.int32)
    assert expand_to_tokens(top_k, ends, 5).dtype is torch.int32


def test_nothing_of_a_sampler_on_a_cpu_is_compiled(monkeypatch):
    rejection, sampler = SimpleNamespace(), SimpleNamespace(Sampler=dict)
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.rejection_sampler", rejection)
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.sampler", sampler)
    worker = VLLMWorkerExtension()
    worker.model_runner = SimpleNamespace(device=torch.device("cpu"), sampler=None)
    assert not worker.prepare_sampler()
    assert rejection.expand_batch_to_tokens is expand_to_tokens
    count = sampler.batched_count_greater_than
    assert count is count_at_least
    assert count(torch.tensor([[1.0, 3, 2], [0, 0, 0]]), torch.tensor([[2.0], [1]])).tolist() == [
        2,
        0,
    ]
