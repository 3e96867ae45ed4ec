# %% [markdown]
# # 3. Your own environment
#
# A game of several turns: guess a number from 1 to 9; the environment answers `<` or `>` until it is found. `Procedural` makes tasks of a random
# generator and keeps training and test apart; what is left to write is the game.

# %%
import asyncio

import ratchet as rt
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.protocols import Step
from ratchet.testing import check_environment


class Guess(Procedural):
    name = "guess"
    max_turns = 4

    def sample(self, rng):
        secret = rng.randint(1, 9)
        # The prompt's text decides whether a game is held out, so each has a number of its own.
        return Problem(f"game {rng.randrange(1000)}?", str(secret), {"secret": secret})

    async def reset(self, task):
        self.secret, self.turn = task.meta["secret"], 0
        return task.messages

    async def step(self, message):
        self.turn += 1
        guess = message.text.strip()
        if guess not in "123456789" or len(guess) != 1:
            return Step(reward=0.0, done=True, metrics={"illegal": 1.0})
        if int(guess) == self.secret:
            return Step(reward=1.0, done=True)
        hint = "<" if self.secret < int(guess) else ">"
        return Step((rt.Message("user", hint),), reward=0.0, done=self.turn == self.max_turns)

    def demonstration(self, task):
        """Halve the range: at most four guesses."""
        low, high, dialogue = 1, 9, []
        while True:
            guess = (low + high) // 2
            dialogue.append(rt.Message("assistant", str(guess)))
            if guess == task.meta["secret"]:
                return dialogue
            is_below = task.meta["secret"] < guess
            low, high = (low, guess - 1) if is_below else (guess + 1, high)
            dialogue.append(rt.Message("user", "<" if is_below else ">"))


# %% [markdown]
# ## Does it keep the contract?
#
# Tasks repeat given a seed, splits don't overlap, demonstrations earn the full reward, and nonsense ends as a low reward, never as an exception.

# %%
check_environment(Guess(), n=5)

# %% [markdown]
# ## Teach it, then let it play

# %%
tokenizer = rt.character_tokenizer("0123456789game ?<>")
model = rt.init_policy(rt.get_preset("tiny", tokenizer.vocab_size), seed=0)
policy = rt.Policy.create(model, tokenizer, template="turns")
setup = rt.EnvSetup(Guess())
sampling = rt.Sampling(temperature=1.0, max_new_tokens=2)
adamw = rt.OptimizerConfig
stages = [
    (rt.SFTConfig(), rt.StageSpec("sft", 40, 64, sampling, adamw(lr=3e-3))),
    (rt.GRPOConfig(group_size=8), rt.StageSpec("grpo", 40, 32, sampling, adamw(lr=1e-3))),
]
wins = []
for config, spec in stages:
    run = rt.make_run(policy, setup, rt.build(config), spec)
    asyncio.run(rt.train(run))
    wins.append(run.progress.accuracy)
    print(f"{run.name}: {wins[-1]:.0%} of held-out games won")

# %%
assert wins[-1] > wins[0] + 0.05
