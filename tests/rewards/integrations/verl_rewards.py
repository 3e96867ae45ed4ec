"""Reward functions as users of verl and OpenRLHF write them."""

import torch


def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    assert data_source == "openai/gsm8k"
    assert extra_info["num_turns"] == 2
    correct = solution_str.rpartition("#### ")[2] == ground_truth
    return {
        "score": scale * correct,
        "acc": correct,
        "pred": solution_str,
        "split": extra_info["split"],
    }


async def compute_score_async(data_source, solution_str, ground_truth, extra_info=None):
    return torch.tensor(float(solution_str == ground_truth))


def without_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}


def reward_func(queries, prompts, labels):
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([float(a == b) for a, b in zip(answers, labels, strict=True)])
    return {
        "rewards": rewards,
        "scores": rewards * 2,
        "extra_logs": {"length": torch.tensor([7.0])},
    }


def reward_tensor(queries, prompts, labels):
    return torch.tensor(
        [float(label in query) for query, label in zip(queries, labels, strict=True)]
    )


def finds_nothing(*arguments, **keywords):
    return next(iter([]))


def uses_up(data_source, solution_str, ground_truth, extra_info=None, spare=()):
    return float(ground_truth.pop() + extra_info["tests"].pop() + spare.pop())


def uses_up_labels(queries, prompts, labels):
    return labels[0].pop()
