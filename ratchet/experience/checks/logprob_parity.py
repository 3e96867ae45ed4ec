"""The parity gate: compare the sampler's log-probabilities with the learner's.

The sampler and the learner compute the same policy from the same weights, but with different code
and often in different precision. If they disagree, the run optimizes another policy than it samples
from, and often looks healthy (the training-inference mismatch). So before an update, while both
have the same weights, the learner scores some of the tokens just sampled. If the difference is too
large, a report compares weights, tokenizer, temperature, dtype and kernels to find the cause.

T = tokens of the rows that are compared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.config.experience import ParityConfig
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ParityError, link_symptom
from ratchet.protocols import Generator, Learner, WeightSync
from ratchet.types import Sampling

log = logging.getLogger(__name__)

# Starts of the ranges of positions in which the difference is reported.
POSITIONS = (0, 1, 4, 16, 64, 256, 1024)
# A generator with one of these formats rounds the weights it receives, so they are not compared.
QUANTISED = ("float8", "nf4")
N_REPEATED = 4  # number of rows, and of tokens per row, that the sampler generates again


@dataclass(frozen=True)
class ParityPair:
    """The learner and the sampler to compare."""

    learner: Learner
    generator: Generator
    weight_sync: WeightSync
    fingerprints: Mapping[str, str]
    """The fingerprints of the tokenizers, by owner: "policy" and, if known, "generator"."""

    @classmethod
    def create(
        cls, learner: Learner, generator: Generator, weight_sync: WeightSync, tokenizer: Tokenizer
    ) -> ParityPair:
        """Return the pair to compare; `tokenizer` is the policy's."""
        fingerprints = {"policy": tokenizer.fingerprint}
        if isinstance(generator.tokenizer, Tokenizer):
            fingerprints["generator"] = generator.tokenizer.fingerprint
        return cls(learner, generator, weight_sync, fingerprints)


@dataclass(frozen=True)
class ParityFinding:
    """The result of one check; `is_cause` is True if `cause` explains the difference."""

    cause: str
    text: str
    is_cause: bool = False


class ParityGate:
    """A parity check of some steps, which stops the run or warns (see `ParityConfig`).

    Steps are counted from the start of the stage, in a resumed run too.
    """

    def __init__(self, pair: ParityPair, config: ParityConfig) -> None:
        self.pair = pair
        self.threshold = config.threshold
        self.action = config.action
        self.first_steps = config.first_steps
        self.every = config.every
        self.sample = config.sample

    def is_due(self, step: int) -> bool:
        """True if this step of the stage must be checked."""
        return step < self.first_steps or (self.every > 0 and step % self.every == 0)

    async def check(self, batch: Batch, version: int) -> dict[str, float]:
        """Compare some rows of a batch, and return the metrics.

        Rows with tokens of other versions are left out; {} if none remain.

        Args:
            batch: The batch that was just sampled.
            version: The version of the learner's weights.

        Raises:
            ParityError: The difference exceeds the threshold, and `parity.action` is "stop".
                Otherwise the report is logged.
        """
        rows = select_comparable_rows(batch, version)
        if not rows:
            return {}
        subset = batch.take(_sample_evenly(rows, self.sample))
        difference_T = await self._compute_difference(subset)
        mean = float(difference_T.mean())
        maximum = float(difference_T.max())
        # Written so that NaN fails too.
        if not mean <= self.threshold:
            report = await self.report(subset, difference_T)
            if self.action == "stop":
                raise ParityError(report)
            log.warning("%s", report)
        return {"mean": mean, "max": maximum, "tokens": float(len(difference_T))}

    async def _compute_difference(self, subset: Batch) -> Tensor:
        """Return |learner - sampler| of each predicted token, float64."""
        logprobs_T = (await self.pair.learner.score(subset, ["logprobs"]))["logprobs"]
        return (logprobs_T.double() - subset.rollout_logprobs_T.double()).abs()[subset.predicted_T]

    async def report(self, subset: Batch, difference_T: Tensor) -> str:
        """Return the report: the finding that explains the difference, and then all findings."""
        findings = [
            await self._compare_weights(),
            self._compare_tokenizers(),
            await self._check_temperature(subset),
            self._compare_dtypes(),
            *await self._check_kernels(subset, difference_T),
        ]
        explanation = next((finding for finding in findings if finding.is_cause), None)
        verdict = (
            f"the cause is: {explanation.cause} ({explanation.text})"
            if explanation
            else "weights and inputs agree: a kernel differs"
        )
        lines = [f"  {finding.cause:<12} {finding.text}" for finding in findings]
        return "\n".join(
            (
                f"sampler and learner differ by {float(difference_T.mean()):.3g} nats per token on "
                "average, at most "
                f"{float(difference_T.max()):.3g} (parity.threshold={self.threshold:g}, "
                f"{len(difference_T)} tokens): {verdict}",
                *lines,
                "If this is expected, raise parity.threshold or set parity.action=warn. "
                f"{link_symptom('sampler-and-learner-disagree')}",
            )
        )

    # --- possible causes

    @property
    def _generator_precision(self) -> str | None:
        """The format to which the generator rounds received weights; None: it does not round."""
        return self.pair.generator.precision

    async def _compare_weights(self) -> ParityFinding:
        if self._generator_precision in QUANTISED:
            return ParityFinding(
                "weights",
                "not compared: the generator rounds received weights to "
                f"{self._generator_precision}",
            )
        differing = await self.pair.weight_sync.audit()
        if differing is None:
            return ParityFinding("weights", "not compared: the generator doesn't show them")
        if not differing:
            return ParityFinding("weights", "equal, by the checksum of every tensor")
        return ParityFinding(
            "weights",
            f"{len(differing)} tensors differ, the first is {differing[0]}",
            is_cause=True,
        )

    def _compare_tokenizers(self) -> ParityFinding:
        fingerprints = self.pair.fingerprints
        if len(set(fingerprints.values())) > 1:
            return ParityFinding(
                "tokenizer",
                "different: "
                + ", ".join(f"{name} {value}" for name, value in fingerprints.items()),
                is_cause=True,
            )
        return ParityFinding(
            "tokenizer", "the same" if len(fingerprints) > 1 else "not compared: only one is known"
        )

    async def _check_temperature(self, subset: Batch) -> ParityFinding:
        """Test whether the sampler ignored the temperature, or applied it twice."""
        temperature_S = subset.temperature_S
        if bool((temperature_S == 1).all()):
            return ParityFinding("temperature", "1, which can't be applied wrongly")
        for fault, used_S in (
            ("ignores", torch.ones_like(temperature_S)),
            ("applies twice", temperature_S.square()),
        ):
            mean = float(
                (await self._compute_difference(replace(subset, temperature_S=used_S))).mean()
            )
            if mean <= self.threshold:
                return ParityFinding(
                    "temperature",
                    f"the sampler {fault} it: with the same fault, the learner differs by "
                    f"{mean:.3g} nats",
                    is_cause=True,
                )
        return ParityFinding("temperature", "does not explain the difference")

    def _compare_dtypes(self) -> ParityFinding:
        learner_dtypes = {
            shard.tensor.dtype
            for shard in self.pair.learner.weights()
            if shard.tensor.is_floating_point()
        }
        generator_dtypes = {shard.tensor.dtype for shard in self.pair.generator.weights()}
        generator_format = self._generator_precision or _join_dtype_names(generator_dtypes)
        if not learner_dtypes or not generator_format:
            return ParityFinding("dtype", "not compared: one of the two doesn't show its weights")
        return ParityFinding(
            "dtype",
            f"learner {_join_dtype_names(learner_dtypes)}, generator {generator_format}",
            is_cause=_join_dtype_names(learner_dtypes) != generator_format,
        )

    async def _check_kernels(self, subset: Batch, difference_T: Tensor) -> list[ParityFinding]:
        """Return findings on the positions of the difference, and on batch invariance."""
        differences_alone = [
            await self._compute_difference(subset.take([row])) for row in range(subset.n_sequences)
        ]
        learner_change = float((torch.cat(differences_alone) - difference_T).abs().max())
        return [
            ParityFinding("positions", _describe_by_position(subset, difference_T)),
            ParityFinding(
                "batches",
                f"alone or together: learner {learner_change:.3g}, sampler "
                f"{await self._compare_batched_with_alone(subset):.3g} at most",
            ),
        ]

    async def _compare_batched_with_alone(self, subset: Batch) -> float:
        """Generate answers to some prompts, batched and one by one. Return the largest difference.

        The logprobs of both answers are compared up to the first token that differs.
        """
        generator = self.pair.generator
        starts = subset.starts_S.tolist()
        requests = []
        for row in range(min(N_REPEATED, subset.n_sequences)):
            row_slice = slice(starts[row], starts[row] + int(subset.lengths_S[row]))
            first = int(subset.predicted_T[row_slice].nonzero()[0])
            sampling = Sampling(
                temperature=float(subset.temperature_S[row]), max_new_tokens=N_REPEATED, seed=row
            )
            media = (
                [placed for placed in subset.media_S[row] if placed.start < first]
                if subset.media_S
                else []
            )
            requests.append((subset.tokens_T[row_slice][:first].tolist(), sampling, media))
        batched_completions = await asyncio.gather(
            *(generator.generate(*request) for request in requests)
        )
        largest = 0.0
        for request, batched in zip(requests, batched_completions, strict=True):
            alone = await generator.generate(*request)
            for token_alone, token_batched, logprob_alone, logprob_batched in zip(
                alone.tokens, batched.tokens, alone.logprobs, batched.logprobs, strict=False
            ):
                if token_alone != token_batched:
                    break
                largest = max(largest, abs(float(logprob_alone) - float(logprob_batched)))
        return largest


def select_comparable_rows(batch: Batch, version: int) -> list[int]:
    """Return the indices of rows whose predicted tokens were all sampled by this version."""
    predicted_S = batch.sequence_sum(batch.predicted_T.double())
    current_S = batch.sequence_sum((batch.predicted_T & (batch.versions_T == version)).double())
    return ((predicted_S > 0) & (predicted_S == current_S)).nonzero().squeeze(1).tolist()


def _sample_evenly(rows: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the rows, evenly spaced and beginning with the first."""
    if len(rows) <= count:
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def _describe_by_position(subset: Batch, difference_T: Tensor) -> str:
    """Return the mean difference for each range of positions, as text.

    Positions count the predicted tokens of each row.
    """
    predicted_T = subset.predicted_T.long()
    preceding_T = predicted_T.cumsum(0) - predicted_T
    position_T = (preceding_T - preceding_T[subset.starts_S][subset.sequence_T])[subset.predicted_T]
    texts = []
    for first, end in zip(POSITIONS, (*POSITIONS[1:], None), strict=True):
        is_in_range = (position_T >= first) & (position_T < (end if end is not None else torch.inf))
        if is_in_range.any():
            texts.append(f"from {first}: {float(difference_T[is_in_range].mean()):.3g}")
    return ", ".join(texts)


def _join_dtype_names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
