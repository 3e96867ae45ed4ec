"""Conformance checks of the protocols, as functions that raise BrokenRule, an AssertionError.

They take instances or factories, so that backends from other packages can be checked too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ratchet.batch import Batch
from ratchet.errors import DataError
from ratchet.protocols import Generator, Learner, LossTerm, Source
from ratchet.testing.harness import BrokenRule, require
from ratchet.types import Group, Sampling, StopReason


async def check_learner(
    make_learner: Callable[[], Learner],
    batch: Batch,
    terms: Sequence[LossTerm],
    directory: Path,
    *,
    rtol: float = 1e-4,
) -> None:
    """Check a learner on a batch that is weighed for `terms`.

    Scores must be aligned, deterministic and independent of the other sequences. An update must
    change the weights, but not if the batch's weights are all 0. Training must continue bit-equally
    after save and load.
    """
    learner = make_learner()
    logprobs_T = (await learner.score(batch, ["logprobs"]))["logprobs"]
    require(
        logprobs_T.shape == (batch.n_tokens,),
        f"logprobs have shape {tuple(logprobs_T.shape)} for {batch.n_tokens} tokens",
    )
    untrained_T = logprobs_T[~batch.trainable_T]
    require(not untrained_T.any(), "logprobs must be 0 where a token does not train")
    require(bool((logprobs_T[batch.trainable_T] <= 0).all()), "a logprob is above 0")
    again = (await learner.score(batch, ["logprobs"]))["logprobs"]
    require(torch.equal(logprobs_T, again), "scoring the same batch twice differs")
    halves = [
        batch.take(rows)
        for rows in (range(0, batch.n_sequences, 2), range(1, batch.n_sequences, 2))
    ]
    for rows, half in zip(
        (range(0, batch.n_sequences, 2), range(1, batch.n_sequences, 2)), halves, strict=True
    ):
        half_logprobs = (await learner.score(half, ["logprobs"]))["logprobs"]
        expected = torch.cat([logprobs_T[batch.sequence_T == row] for row in rows])
        require(
            torch.allclose(half_logprobs, expected, rtol=rtol, atol=1e-5),
            "a sequence's logprobs depend on its neighbours",
        )

    weights_before = _copy_weights(learner)
    unweighted_batch = replace(
        batch,
        weights={
            k: w._replace(values=torch.zeros_like(w.values)) for k, w in batch.weights.items()
        },
    )
    await learner.update(unweighted_batch, terms)
    require(
        _are_same_weights(weights_before, _copy_weights(learner)),
        "an update whose weights are all 0 changed the model",
    )
    await learner.update(batch, terms)
    require(
        not _are_same_weights(weights_before, _copy_weights(learner)), "an update changed nothing"
    )

    learner.save(directory)
    restored = make_learner()
    restored.load(directory)
    require(
        _are_same_weights(_copy_weights(learner), _copy_weights(restored)),
        "load(save()) gives other weights",
    )
    await learner.update(batch, terms)
    await restored.update(batch, terms)
    require(
        _are_same_weights(_copy_weights(learner), _copy_weights(restored)),
        "the step after load(save()) differs: state is missing",
    )


def _copy_weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in learner.weights()}


def _are_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


async def check_generator(generator: Generator, prompts: Sequence[Sequence[int]]) -> None:
    """Check a generator on some prompts.

    Columns must be aligned, equal seeds must give equal tokens, max_new_tokens and stop ids must
    hold, versions must follow commits, and an empty prompt must raise DataError.
    """
    sampling = Sampling(max_new_tokens=6, seed=1)
    for prompt in prompts:
        first = await generator.generate(prompt, sampling)
        lengths = {
            len(c) for c in (first.tokens, first.logprobs, first.log_kept_mass, first.versions)
        }
        require(len(lengths) == 1, "the completion's columns differ in length")
        require(len(first.tokens) <= 6, "more than max_new_tokens=6 tokens were generated")
        require(
            bool((first.versions == generator.version).all()),
            "tokens don't carry the version in force",
        )
        second = await generator.generate(prompt, sampling)
        require(np.array_equal(first.tokens, second.tokens), "equal requests gave different tokens")
        require(
            np.allclose(first.logprobs, second.logprobs, atol=1e-6),
            "equal requests gave different logprobs",
        )
    first = await generator.generate(prompts[0], sampling)
    stop = int(first.tokens[0])
    stopped = await generator.generate(prompts[0], replace(sampling, stop_ids=(stop,)))
    require(stopped.stop is StopReason.STOP_TOKEN, "a stop id did not end the completion")
    require(
        stopped.tokens.tolist() == [stop], "a completion must end with the stop id, and contain it"
    )
    version = generator.version + 1
    await generator.prepare({})
    await generator.receive(iter(()))
    await generator.commit(version)
    require(generator.version == version, "commit did not set the version")
    after = await generator.generate(prompts[0], sampling)
    require(bool((after.versions == version).all()), "tokens after a commit carry the old version")
    try:
        await generator.generate([], sampling)
    except DataError:
        return
    raise BrokenRule("an empty prompt must raise DataError")


async def check_source(source: Source) -> None:
    """Check a source's draws and restores.

    Ids must never repeat, and acknowledged groups must not come again. Groups that were drawn but
    not acknowledged must come again after a restore.
    """
    first = await source.draw(3, 0)
    require(len(first) == 3, f"draw(3) gave {len(first)} groups, not 3")
    source.ack([group.id for group in first], 0)
    state = json.loads(json.dumps(await source.snapshot()))
    second = await source.draw(3, 1)
    ids = [group.id for group in (*first, *second)]
    require(len(set(ids)) == len(ids), "two draws share an id")
    unacknowledged = json.loads(json.dumps(await source.snapshot()))
    await source.restore(state)
    again = await source.draw(3, 1)
    require([g.id for g in again] == [g.id for g in second], "a restored source draws other groups")
    require(_same_tokens(again, second), "a restored draw gives other tokens")
    await source.restore(unacknowledged)
    pending = await source.draw(3, 1)
    require(
        {g.id for g in pending} == {g.id for g in second},
        "groups drawn but not acknowledged were lost",
    )
    first_id, middle_id, last_id = (group.id for group in pending)
    source.ack([middle_id], 1)  # out of order
    source.nack([last_id], "lost")
    await source.restore(json.loads(json.dumps(await source.snapshot())))
    remaining = await source.draw(2, 1)
    require(
        {g.id for g in remaining} == {first_id, last_id},
        "an acknowledged group came again, or a refused one was lost",
    )


def _same_tokens(a: Sequence[Group], b: Sequence[Group]) -> bool:
    def tokens(groups: Sequence[Group]) -> list[list[int]]:
        return [t.tokens.tolist() for g in groups for t in g.trajectories]

    return tokens(a) == tokens(b)
