"""The reward functions that trl_grpo.yaml and verl_ppo.yaml name."""


def brevity(completions, **kwargs):
    return [1.0 / (1 + len(messages[0]["content"])) for messages in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return scale * (solution_str == ground_truth)
