"""An environment written to the batched interface: copy the last digit that was said, turn after
turn.

From Ratchet it imports the interface alone.
"""

from itertools import product

import torch

from ratchet.experience.nemo_rl import EnvironmentInterface, EnvironmentReturn

DIGITS = "0123"


class Copying(EnvironmentInterface[dict]):
    def __init__(self, reward: float = 1.0):
        self.reward = reward

    def step(self, message_log_batch, metadata):
        rewards, observations, terminateds = [], [], []
        for log, state in zip(message_log_batch, metadata, strict=True):
            asked, rest = state["asked"][0], state["asked"][1:]
            rewards.append(self.reward * (log[-1]["content"] == asked))
            observations.append({"role": "environment", "content": rest[:1] or "done"})
            terminateds.append(not rest)
            state["asked"] = rest
        stops = [list(DIGITS)] * len(metadata)
        return EnvironmentReturn(
            observations, metadata, stops, torch.tensor(rewards), torch.tensor(terminateds), None
        )

    def global_post_process_and_metrics(self, batch):
        perfect = batch["total_reward"] >= self.reward * torch.tensor(
            [float(turns(log)) for log in batch["message_log"]]
        )
        return batch, {"perfect": perfect.float().mean().item()}


def turns(log):
    return sum(entry["role"] == "assistant" for entry in log)


def samples(split):
    """Every eighth of the 16 pairs of digits is kept for the test."""
    pairs = ["".join(digits) for digits in product(DIGITS, repeat=2)]
    return [
        {
            "message_log": [{"role": "user", "content": asked[::-1]}],
            "extra_env_info": {"asked": asked},
            "stop_strings": list(DIGITS),
            "idx": index,
            "task_name": "copying",
        }
        for index, asked in enumerate(pairs)
        if (index % 8 == 5) == (split == "test")
    ]
