"""Asks a server with the official clients, and prints what they report as JSON. It runs in the
clients' own environment: `ask.py URL MODEL_DIRECTORY TASK_DIRECTORY`."""

from __future__ import annotations

import json
import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def ask_openenv(url: str) -> dict[str, object]:
    from openenv.core.harness.capture.validate_llm import validate_llm

    report = validate_llm(url, "policy")
    return {
        "capture_level": report.capture_level,
        "logprobs_mode": report.logprobs_mode,
        "param_fixes": report.param_fixes,
    }


def ask_litellm(url: str) -> dict[str, object]:
    import litellm

    answer = litellm.completion(
        model="openai/any-name",
        api_base=url,
        api_key="none",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    return {
        "prompt_token_ids": answer.prompt_token_ids,
        "token_ids": choice.provider_specific_fields["token_ids"],
    }


def measure_likelihoods(url: str, model: str, tasks: str) -> dict[str, list[list[float]]]:
    """Return the log-likelihood of each choice of each task, by lm-evaluation-harness's model."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    arguments = {
        "local-completions": f"model=policy,base_url={url}/completions,tokenizer={model},"
        "tokenizer_backend=huggingface,num_concurrent=2,max_length=2048",
        "hf": f"pretrained={model},dtype=float32,device=cpu,max_length=2048",
    }
    # the harness's own tasks are ten thousand files
    manager = TaskManager(include_path=tasks, include_defaults=False)
    likelihoods = {}
    for name, model_args in arguments.items():
        results = lm_eval.simple_evaluate(
            model=name,
            model_args=model_args,
            tasks=["sums"],
            task_manager=manager,
            log_samples=True,
            batch_size=1,
            bootstrap_iters=0,
        )
        samples = sorted(results["samples"]["sums"], key=lambda sample: sample["doc_id"])
        likelihoods[name] = [
            [float(value) for value, _ in sample["filtered_resps"]] for sample in samples
        ]
    return likelihoods


if __name__ == "__main__":
    url, model, tasks = sys.argv[1:]
    answers = {
        "openenv": ask_openenv(url),
        "litellm": ask_litellm(url),
        "lm_eval": measure_likelihoods(url, model, tasks),
    }
    sys.stdout.write("\n" + json.dumps(answers) + "\n")
