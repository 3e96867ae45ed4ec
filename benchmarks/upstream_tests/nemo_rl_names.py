"""NeMo RL's names: its losses and advantages by the importer's recipe, its batches and rollouts."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from benchmarks.upstream_tests.padded import (
    build_algorithm,
    compute_advantages,
    compute_loss,
    make_outputs,
    pack_padded,
    to_group_names,
    to_padded,
)
from benchmarks.upstream_tests.players import RayVirtualCluster, VllmGeneration
from ratchet.algorithms.advantages.teacher import on_policy_distillation
from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.kl import kl_penalty
from ratchet.commands.migrate.importer import PEERS, convert
from ratchet.commands.migrate.read_config import FlatConfig
from ratchet.config.resolve import build, resolve
from ratchet.experience.nemo_rl import (
    BatchedDataDict,
    DatumSpec,
    EnvironmentInterface,
    EnvironmentReturn,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    rollouts,
)
from ratchet.experience.nemo_rl.metrics import compute_percentile
from ratchet.experience.nemo_rl.micro_batches import DynamicBatchingArgs, SequencePackingArgs
from ratchet.experience.nemo_rl.packed_media import pack_logs
from ratchet.experience.nemo_rl.packed_tensor import PackedTensor


class Config(BaseModel, extra="allow"):
    """Any configuration. Attributes that are not set are None."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]
        except AttributeError:
            if name.startswith("_"):
                raise
            return None


class ClippedPGLossConfig(Config):
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: str = "k3"
    use_kl_in_reward: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    truncated_importance_sampling_type: str | None = None
    token_level_loss: bool = True
    sequence_level_importance_ratios: bool = False
    disable_ppo_ratio: bool = False
    use_cispo: bool = False
    force_on_policy_ratio: bool = False


def to_recipe(method: str, section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the algorithm of the recipe that the importer makes of NeMo RL's keys."""
    flat = {f"{section}.{key}": value for key, value in values.items() if value is not None}
    result = convert(PEERS["nemo-rl"], method, FlatConfig(flat))
    refused = [item.note for item in result.dropped if "must be <=" in item.note]
    if refused:
        raise AssertionError(refused[0])
    return dict(result.recipe["algorithm"])


class ClippedPGLossFn:
    def __init__(self, cfg: Any, **_: Any) -> None:
        self.cfg = cfg
        values = cfg.model_dump() if isinstance(cfg, BaseModel) else dict(cfg)
        section = to_recipe("grpo", "loss_fn", values)
        correction = section.get("correction")
        if section["loss"]["kind"] == "gspo":
            # The tests have several advantages in a row, which training never has with GSPO.
            section["loss"]["kind"] = "gspo_token"
        self.section = {
            "kind": "policy_gradient",
            "advantage": {"kind": "turn_returns"},
            **{key: section[key] for key in ("loss", "weighting", "kl") if key in section},
            **({"correction": correction} if correction else {}),
        }
        # Columns are read as they are given, so a scoring pass fills old_logprobs.
        self.section |= {"minibatches": 2}
        self.algorithm = build_algorithm(self.section)
        self.is_token_level = values.get("token_level_loss", True)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        mask = mask * (torch.arange(mask.shape[1]) > 0)
        current = torch.nn.functional.pad(next_token_logprobs, (1, 0))
        old = current.detach() if self.cfg.force_on_policy_ratio else data["prev_logprobs"]
        columns = {
            "advantages": data["advantages"],
            "old_logprobs": old.detach(),
            "ref_logprobs": data["reference_policy_logprobs"],
            "rollout_logprobs": data["generation_logprobs"],
        }
        # Each row is a group of its own.
        batch = pack_padded(mask, groups=range(len(mask)), columns=columns)
        clipped = 0.0
        if "correction" in self.section:
            config: Any = resolve("algorithm", self.section)
            batch = build(config.correction)(batch, AlgoState())
            clipped = batch.metrics["correction/clipped_share"]
        out = make_outputs(batch, logprobs=current * mask.bool(), old_logprobs=old.detach())
        loss, metrics = compute_loss(self.algorithm, batch, out)
        metrics["probs_ratio"] = metrics["ratio"]
        metrics["is_oob_ratio"] = torch.tensor(clipped)
        own, whole = (
            (mask.sum(), global_valid_toks)
            if self.is_token_level
            else ((mask.sum(1) > 0).sum(), global_valid_seqs)
        )
        return (loss * own / whole).float() if whole else loss.float(), {
            **{name: value.item() for name, value in metrics.items()},
            "loss": loss.item(),
        }


class NLLLossFn:
    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_toks: Tensor, **_: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        mask = mask * (torch.arange(mask.shape[1]) > 0)
        batch = pack_padded(mask, groups=range(len(mask)))
        current = torch.nn.functional.pad(next_token_logprobs, (1, 0)) * mask
        loss, _ = compute_loss(
            build_algorithm({"kind": "sft"}), batch, make_outputs(batch, logprobs=current)
        )
        return (loss * mask.sum() / global_valid_toks).float(), {
            "loss": loss.item(),
            "num_unmasked_tokens": int(mask.sum()),
        }


class DPOLossFn:
    def __init__(self, cfg: Any, **_: Any) -> None:
        self.cfg = cfg

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, **_: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        mask = mask * (torch.arange(mask.shape[1]) > 0)
        current = torch.nn.functional.pad(next_token_logprobs, (1, 0)) * mask
        pairs = [row // 2 for row in range(len(mask))]
        columns = {"ref_logprobs": data["reference_policy_logprobs"] * mask}
        rewards = torch.tensor([1.0, 0.0]).repeat(len(mask) // 2)
        batch = pack_padded(mask, groups=pairs, rewards_B=rewards, columns=columns)
        out = make_outputs(batch, logprobs=current)
        cfg = self.cfg
        section = {
            "kind": "dpo",
            "beta": cfg.reference_policy_kl_penalty or 1e-9,
            "normalize": "mean" if cfg.preference_average_log_probs else "sum",
        }
        preference, metrics = compute_loss(build_algorithm(section), batch, out)
        loss = cfg.preference_loss_weight * preference
        metrics["preference_loss"], metrics["sft_loss"] = preference, torch.zeros(())
        if cfg.sft_loss_weight:
            # The sum over the tokens of chosen answers is the mean times their number.
            chosen = mask[::2]
            nll_batch = pack_padded(chosen, groups=range(len(chosen)))
            nll_out = make_outputs(nll_batch, logprobs=current[::2])
            mean, _ = compute_loss(build_algorithm({"kind": "sft"}), nll_batch, nll_out)
            scale = 1.0 if cfg.sft_average_log_probs else chosen.sum() / len(chosen)
            metrics["sft_loss"] = mean * scale
            loss = loss + cfg.sft_loss_weight * mean * scale
        own = (mask.sum(1) > 0).sum()
        return (loss * own / global_valid_seqs).float(), {
            name: value.item() for name, value in metrics.items()
        }


class DistillationLossFn:
    def __init__(self, cfg: Any, **_: Any) -> None:
        self.cfg = cfg
        self.kl_type, self.mixed_kl_weight = cfg.kl_type, cfg.mixed_kl_weight
        self.zero_outside_topk = cfg.zero_outside_topk
        self.section = {
            "kind": "distill_on_policy",
            "teacher": "teacher",
            "objective": cfg.kl_type,
            **({"mix": cfg.mixed_kl_weight} if cfg.kl_type == "mixed" else {}),
        }

    def __call__(
        self,
        student_logits: Tensor,
        data: Any,
        global_valid_toks: Tensor,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        indices = data["teacher_topk_indices"]
        teacher = data["teacher_topk_logits"].float().log_softmax(-1)
        student = student_logits.float().gather(-1, indices).log_softmax(-1)
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        mask = mask * (torch.arange(mask.shape[1]) < mask.shape[1] - 1)  # the next token's
        # Outcomes of position t are of token t + 1 there, and of their own token here.
        mask, teacher, student = (x.roll(1, 1) for x in (mask, teacher, student))
        batch = pack_padded(mask, groups=range(len(mask)))
        batch = batch.fill_tokens(teacher_topk_logprobs=teacher.flatten(0, 1))
        out = make_outputs(batch, topk_logprobs=student)
        loss, _ = compute_loss(build_algorithm(self.section), batch, out)
        return (loss * mask.sum() / global_valid_toks).float(), {"loss": loss.item()}


class MseValueLossFn:
    def __init__(self, cfg: Any) -> None:
        self.scale = cfg.scale
        self.algorithm = build_algorithm({"kind": "ppo", "critic": {"value_clip": cfg.cliprange}})

    def __call__(
        self, values: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        padded, current, returns, old = (  # a prompt before the answer
            torch.nn.functional.pad(x.squeeze(-1) if x.ndim > 2 else x, (1, 0))
            for x in (mask, values, data["returns"], data["values"])
        )
        columns = {"returns": returns, "values": old}
        columns["valued"] = padded.bool()
        batch = pack_padded(padded, groups=range(len(mask)), columns=columns)
        out = make_outputs(batch, values=current)
        loss, metrics = compute_loss(self.algorithm, batch, out, role="critic")
        return (self.scale * loss * mask.sum() / global_valid_toks).float(), {
            name: value.item() for name, value in metrics.items()
        }


def prepare_loss_input(logits: Tensor, data: Any, loss_fn: Any, **_: Any) -> tuple[Any, Any]:
    if isinstance(loss_fn, DistillationLossFn):
        if data["teacher_topk_logits"].shape[-1] == 0:
            raise ValueError("topk must be positive")
        return {"student_logits": logits}, data
    logprobs = logits.float().log_softmax(-1)[:, :-1]
    picked = logprobs.gather(-1, data["input_ids"][:, 1:].long().unsqueeze(-1)).squeeze(-1)
    return {"next_token_logprobs": picked}, data


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: str = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: Tensor | None = None,
) -> Tensor:
    """Return the value of `kl_penalty`, which has no clamps: tests with clamps show that."""
    mask = torch.ones_like(logprobs)
    padded = torch.nn.functional.pad(mask, (1, 0))
    padded[:, 0] = 0
    current = torch.nn.functional.pad(logprobs, (1, 0))
    reference = torch.nn.functional.pad(logprobs_reference, (1, 0))
    batch = pack_padded(padded, columns={"ref_logprobs": reference})
    out = make_outputs(batch, logprobs=current, old_logprobs=current.detach())
    kind: Any = kl_type
    value, _ = kl_penalty(out, batch, objective="reverse", estimator=kind)
    return value.reshape(padded.shape)[:, 1:].float()


class _Estimator:
    """It computes advantages by the recipe of its configuration."""

    def __init__(self, estimator_config: Any, loss_config: Any) -> None:
        self.config, self.loss_config = estimator_config, loss_config

    def section(self) -> dict[str, Any]:
        raise NotImplementedError

    def advantages(self, mask: Tensor, **columns: Any) -> Tensor:
        padded = torch.nn.functional.pad(mask, (1, 0))  # a prompt before the answer
        batch = compute_advantages(self.section(), pack_padded(padded, **columns))
        return to_padded(batch.need("advantages"), padded)[:, 1:]


class GRPOAdvantageEstimator(_Estimator):
    def section(self) -> dict[str, Any]:
        values = {
            "use_leave_one_out_baseline": self.config.use_leave_one_out_baseline,
            "normalize_rewards": self.config.normalize_rewards,
        }
        section = to_recipe("grpo", "grpo", values)
        return {key: section[key] for key in ("kind", "advantage")} | {"group_size": 2}

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **_: Any
    ) -> Tensor:
        return self.advantages(mask, groups=to_group_names(prompt_ids), rewards_B=rewards)


class GDPOAdvantageEstimator(_Estimator):
    def section(self) -> dict[str, Any]:
        weights = getattr(self.config, "reward_weights", None)
        named = dict(zip(self.names, weights, strict=True)) if weights else None
        return {"kind": "gdpo", "group_size": 2, "advantage": {"weights": named}}

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Any, mask: Tensor, repeated_batch: Any, **_: Any
    ) -> Tensor:
        parts = {
            key.partition("/")[2]: value
            for key, value in repeated_batch.items()
            if key.startswith("reward/")
        }
        self.names = list(parts)
        return self.advantages(mask, groups=to_group_names(prompt_ids), parts=parts)


class ReinforcePlusPlusAdvantageEstimator(_Estimator):
    def section(self) -> dict[str, Any]:
        baseline = "group" if self.config.minus_baseline else "none"
        return {"kind": "reinforce_pp", "group_size": 2, "advantage": {"baseline": baseline}}

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **_: Any
    ) -> Tensor:
        return self.advantages(mask, groups=to_group_names(prompt_ids), rewards_B=rewards)


class GeneralizedAdvantageEstimator(_Estimator):
    def section(self) -> dict[str, Any]:
        values = {f"adv_estimator.{key}": value for key, value in self.config.items()}
        section = to_recipe("ppo", "ppo", values)
        section = {key: section[key] for key in ("kind", "advantage", "whiten") if key in section}
        if (
            self.has_reference
            and self.loss_config.use_kl_in_reward
            and self.loss_config.reference_policy_kl_penalty
        ):
            coef = self.loss_config.reference_policy_kl_penalty
            section["kl"] = {"coef": coef, "place": "reward"}
        return section

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor,
        reference_logprobs: Tensor | None = None,
        logprobs: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        self.has_reference = reference_logprobs is not None
        padded = torch.nn.functional.pad(mask, (1, 0))
        columns = {
            name: torch.nn.functional.pad(x, (1, 0))
            for name, x in (
                ("values", values),
                ("ref_logprobs", reference_logprobs),
                ("old_logprobs", logprobs),
            )
            if x is not None
        }
        batch = pack_padded(padded, groups=range(len(mask)), rewards_B=rewards, columns=columns)
        batch = batch.fill_sequences(bootstrap_values=torch.zeros(len(mask)).double())
        batch = compute_advantages(self.section(), batch)
        advantages = to_padded(batch.need("advantages"), padded)[:, 1:]
        returns = to_padded(batch.need("returns"), padded)[:, 1:]
        return advantages, returns


class RawRewardAdvantageEstimator(_Estimator):
    def section(self) -> dict[str, Any]:
        whiten = bool(self.config["normalize_advantages"])
        kind = {"kind": "policy_gradient", "advantage": {"kind": "turn_returns"}}
        return {**kind, "whiten": whiten}

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        return self.advantages(mask, groups=range(len(mask)), rewards_B=rewards), None


class OPDAdvantageEstimator(_Estimator):
    def __init__(self, estimator_config: Any = None, loss_config: Any = None, **_: Any) -> None:
        super().__init__(estimator_config, loss_config)

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **columns: Any
    ) -> Tensor:
        teacher, student = columns["teacher_logprobs"], columns["prev_logprobs"]
        padded = torch.nn.functional.pad(mask, (1, 0))
        filled = {
            "teacher_logprobs": torch.nn.functional.pad(teacher, (1, 0)),
            "old_logprobs": torch.nn.functional.pad(student, (1, 0)),
        }
        batch = pack_padded(padded, groups=range(len(mask)), columns=filled)
        batch = on_policy_distillation(batch, AlgoState())
        return to_padded(batch.need("advantages"), padded)[:, 1:]


def batched_message_log_to_flat_message(logs: Any, **_: Any) -> tuple[Any, Tensor]:
    """Return the tokens of whole logs, padded, and their media."""
    rows = [torch.cat([torch.as_tensor(entry["token_ids"]) for entry in log]) for log in logs]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    columns = {"token_ids": tokens, **pack_logs(logs)}
    return BatchedDataDict(columns), torch.tensor([len(row) for row in rows])


def make_config(name: str) -> type[Config]:
    return type(name, (Config,), {})


LOSSES = {
    "ClippedPGLossConfig": ClippedPGLossConfig,
    "ClippedPGLossFn": ClippedPGLossFn,
    "NLLLossFn": NLLLossFn,
    "DPOLossConfig": make_config("DPOLossConfig"),
    "DPOLossFn": DPOLossFn,
    "DistillationLossConfig": make_config("DistillationLossConfig"),
    "DistillationLossFn": DistillationLossFn,
    "MseValueLossConfig": make_config("MseValueLossConfig"),
    "MseValueLossFn": MseValueLossFn,
    "prepare_loss_input": prepare_loss_input,
}
ESTIMATORS: dict[str, Any] = {
    "AdvEstimatorConfig": make_config("AdvEstimatorConfig"),
    **{
        cls.__name__: cls
        for cls in (
            GRPOAdvantageEstimator,
            GDPOAdvantageEstimator,
            ReinforcePlusPlusAdvantageEstimator,
            GeneralizedAdvantageEstimator,
            RawRewardAdvantageEstimator,
            OPDAdvantageEstimator,
        )
    },
}
ROLLOUTS = {
    name: getattr(rollouts, name)
    for name in (
        "generate_responses",
        "generate_responses_async",
        "calculate_rewards",
        "run_multi_turn_rollout",
        "async_generate_response_for_sample_turn",
        "run_sample_multi_turn_rollout",
        "run_async_multi_turn_rollout",
    )
}
NAMES: dict[str, dict[str, Any]] = {
    "nemo_rl.algorithms.loss": LOSSES,
    "nemo_rl.algorithms.utils": {"calculate_kl": calculate_kl},
    "nemo_rl.algorithms.advantage_estimator": ESTIMATORS,
    "nemo_rl.algorithms.grpo": ESTIMATORS,
    "nemo_rl.distributed.batched_data_dict": {
        "BatchedDataDict": BatchedDataDict,
        "DynamicBatchingArgs": DynamicBatchingArgs,
        "SequencePackingArgs": SequencePackingArgs,
    },
    "nemo_rl.distributed.virtual_cluster": {"RayVirtualCluster": RayVirtualCluster},
    "nemo_rl.data.llm_message_utils": {
        "batched_message_log_to_flat_message": batched_message_log_to_flat_message
    },
    "nemo_rl.data.interfaces": {"DatumSpec": DatumSpec},
    "nemo_rl.data.multimodal_utils": {"PackedTensor": PackedTensor},
    "ray.cloudpickle": {"dumps": pickle.dumps, "loads": pickle.loads},
    "nemo_rl.environments.interfaces": {
        "EnvironmentInterface": EnvironmentInterface,
        "EnvironmentReturn": EnvironmentReturn,
    },
    "nemo_rl.experience.rollouts": ROLLOUTS,
    "nemo_rl.experience.metric_utils": {"pct": compute_percentile},
    "nemo_rl.models.generation": {
        "VllmGeneration": VllmGeneration,
        "VllmConfig": dict,
        "configure_generation_config": lambda config, *_, **__: config,
        "GenerationDatumSpec": GenerationDatumSpec,
        "GenerationInterface": GenerationInterface,
        "GenerationOutputSpec": GenerationOutputSpec,
    },
}
