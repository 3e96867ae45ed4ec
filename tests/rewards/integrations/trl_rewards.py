"""Reward functions as users of TRL write them. TRL's own trainer runs this file too."""

import asyncio


def exact(prompts, completions, answer, **kwargs):
    """Text prompts and text completions."""
    return [float(text.strip() == str(a)) for text, a in zip(completions, answer, strict=True)]


async def polite(completions, log_metric=None, **kwargs):
    """Messages; async, and with a metric of its own."""
    await asyncio.sleep(0)
    rewards = [0.5 * ("please" in messages[-1]["content"]) for messages in completions]
    log_metric("polite_share", sum(reward > 0 for reward in rewards) / len(rewards))
    return rewards


def only_sums(prompts, completions, completion_ids, answer, **kwargs):
    """None for rows that are no sum."""
    return [
        None if "+" not in prompt[-1]["content"] else float(len(ids) <= 3)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def by_step(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(completions)


def too_few(completions, **kwargs):
    return [1.0]


def not_a_number(completions, **kwargs):
    return [float("nan"), *[1.0] * (len(completions) - 1)]


def broken(completions, **kwargs):
    raise KeyError("no such column")


class Longer:
    def __call__(self, completions, **kwargs):
        return [len(messages[0]["content"]) for messages in completions]


longer = Longer()


def make_length(limit):
    def short(completions, **kwargs):
        return [len(messages[0]["content"]) <= limit for messages in completions]

    return short


def sevens(completions, **kwargs):
    return [messages[0]["content"].count("7") / 8 for messages in completions]


def a_dict(completions, **kwargs):
    return dict.fromkeys(range(len(completions)), 1.0)


def some_bytes(completions, **kwargs):
    return bytes(len(completions))


def pairs(completions, **kwargs):
    import torch

    return torch.ones(len(completions), 2)


def generator_that_breaks(completions, **kwargs):
    yield 1.0
    raise KeyError("no such row")


def shrinking(completions, **kwargs):
    completions.pop()
    return [1.0] * len(completions)


def odd_metrics(completions, log_metric, **kwargs):
    log_metric("text", "high")
    log_metric("mixed", None)
    log_metric("mixed", 2.0)
    return [1.0] * len(completions)


def uses_up(prompts, completions, tests, **kwargs):
    return [test.pop() for test in tests]
