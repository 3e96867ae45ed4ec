"""The key table of NeMo RL's PPO, and the conversions of its advantages and its critic.

"there" in a note means NeMo RL; "here" means Ratchet.
"""

from __future__ import annotations

from typing import Any

from ratchet.commands.migrate import numbers, shared
from ratchet.commands.migrate.nemo_rl import values as to
from ratchet.commands.migrate.nemo_rl.common import common_rows
from ratchet.commands.migrate.nemo_rl.engine import section_rows
from ratchet.commands.migrate.nemo_rl.policy_gradient import LOSS, reward_rows
from ratchet.commands.migrate.nemo_rl.rollouts import rollout_rows
from ratchet.commands.migrate.table import (
    Conversion,
    Dropped,
    Inert,
    KeyRow,
    PeerConfig,
    Values,
    dropped,
    flag,
    no_effect,
    number,
    only_if,
    rows_covered_by,
    switches,
    whole,
)

ESTIMATOR = "ppo.adv_estimator"
VALUE_MEGATRON = "value.megatron_cfg"
# Settings of the critic that follow the policy's here: those of any learner, of a DTensor learner,
# and of a Megatron learner.
CRITIC_SETTINGS = (
    "train_global_batch_size",
    "max_total_sequence_length",
    "precision",
    "max_grad_norm",
)
CRITIC_DTENSOR_SETTINGS = (
    "optimizer.name",
    "optimizer.kwargs.weight_decay",
    "optimizer.kwargs.betas",
    "optimizer.kwargs.eps",
    "scheduler",
    "dtensor_cfg.enabled",
    "dtensor_cfg.tensor_parallel_size",
    "dtensor_cfg.context_parallel_size",
    "dtensor_cfg.sequence_parallel",
    "dtensor_cfg.activation_checkpointing",
    "dtensor_cfg.cpu_offload",
    "dtensor_cfg.lora_cfg.enabled",
)
CRITIC_MEGATRON_SETTINGS = (
    "megatron_cfg.optimizer.optimizer",
    "megatron_cfg.optimizer.min_lr",
    "megatron_cfg.optimizer.weight_decay",
    "megatron_cfg.optimizer.adam_beta1",
    "megatron_cfg.optimizer.adam_beta2",
    "megatron_cfg.optimizer.adam_eps",
    "megatron_cfg.optimizer.clip_grad",
    "megatron_cfg.scheduler.lr_warmup_iters",
    "megatron_cfg.scheduler.lr_decay_style",
    "megatron_cfg.tensor_model_parallel_size",
    "megatron_cfg.pipeline_model_parallel_size",
    "megatron_cfg.expert_model_parallel_size",
    "megatron_cfg.context_parallel_size",
    "megatron_cfg.sequence_parallel",
    "megatron_cfg.activation_checkpointing",
)


def _uses_critic(config: PeerConfig) -> bool:
    return config[f"{ESTIMATOR}.name"] == "gae"


def _with_critic(convert: Conversion | None) -> Conversion:
    """Return the conversion, limited to files whose advantages read a critic."""
    return only_if(_uses_critic, convert, "only gae has a critic")


def _critic_uses_megatron(config: PeerConfig) -> bool:
    return config.flag(f"{VALUE_MEGATRON}.enabled")


def _when_critic_megatron(condition: bool, convert: Conversion | None) -> Conversion:
    """Return the conversion, limited to files whose critic has (or lacks) a Megatron learner."""
    section = VALUE_MEGATRON if condition else "value.dtensor_cfg"
    return only_if(
        lambda config: _critic_uses_megatron(config) == condition,
        convert,
        f"{section} is not enabled there",
    )


def _estimator(value: Any, config: PeerConfig) -> Any:
    if value == "gae":
        # A truncated answer ends with value 0 there.
        return Values({"algorithm.kind": "ppo", "algorithm.advantage.bootstrap": False})
    if value == "raw_reward":
        return Values(
            {
                "algorithm.kind": "policy_gradient",
                "algorithm.advantage": {"kind": "turn_returns"},
                "algorithm.critic": None,
            },
            "the advantage is the reward, without a baseline or a critic",
        )
    return Dropped("only gae and raw_reward are converted: the recipe uses gae")


def _lambdas(value: Any, config: PeerConfig) -> Any:
    """Convert the lambdas of advantages and of the critic's targets.

    The lambda of advantages is, in this order of precedence, `length_adaptive_alpha`,
    `gae_lambda_policy` and `gae_lambda`.
    """
    shared_lambda = numbers.number(value)
    policy_lambda, value_lambda = (
        shared_lambda if config[key] is None else config.number(key)
        for key in (f"{ESTIMATOR}.gae_lambda_policy", f"{ESTIMATOR}.gae_lambda_value")
    )
    alpha_key = f"{ESTIMATOR}.length_adaptive_alpha"
    alpha = 0 if config[alpha_key] is None else config.number(alpha_key)
    if alpha > 0:
        return Values(
            {
                "algorithm.advantage.length_alpha": alpha,
                "algorithm.advantage.value_lam": value_lambda,
            }
        )
    separate = {} if value_lambda == policy_lambda else {"value_lam": value_lambda}
    lambdas = {"lam": policy_lambda, **separate}
    return Values({f"algorithm.advantage.{name}": lam for name, lam in lambdas.items()})


def _critic_epochs(value: Any, config: PeerConfig) -> Any:
    if numbers.whole(value) == config.whole("ppo.ppo_epochs"):
        return Inert("the critic trains in each of algorithm.epochs, as there")
    return Dropped("the critic trains as often as the policy here (algorithm.epochs)")


def _value_clip(value: Any, config: PeerConfig) -> Any:
    """Convert the clip of values. Values of 0 or less turn it off there, null here."""
    bound = numbers.number(value)
    return bound if bound > 0 else None


def _value_scale(value: Any, config: PeerConfig) -> Any:
    if numbers.number(value) == 1:
        return Inert("the value loss has weight 1 here too")
    return Dropped(
        "the value loss has weight 1 here: AdamW's steps do not depend on it, but "
        "optimizer.max_grad_norm clips the critic's gradient at another size"
    )


def _critic_model(value: Any, config: PeerConfig) -> Any:
    if value == config["policy.model_name"]:
        return Inert("the critic is a copy of the policy with a scalar head here too")
    return Dropped("the critic is a copy of the policy with a scalar head, not another model")


ADVANTAGES = (
    KeyRow(
        f"{ESTIMATOR}.gae_lambda",
        "algorithm.advantage.lam, algorithm.advantage.value_lam, algorithm.advantage.length_alpha",
        convert=_with_critic(_lambdas),
        default=0.95,
    ),
    *rows_covered_by(
        f"{ESTIMATOR}.gae_lambda",
        f"{ESTIMATOR}.gae_lambda_policy",
        f"{ESTIMATOR}.gae_lambda_value",
        f"{ESTIMATOR}.length_adaptive_alpha",
    ),
    KeyRow(
        f"{ESTIMATOR}.gae_gamma",
        "algorithm.advantage.gamma",
        convert=_with_critic(number),
        default=1.0,
    ),
    KeyRow(
        f"{ESTIMATOR}.normalize_advantages",
        "algorithm.whiten",
        convert=flag,
        default=True,
    ),
)
CRITIC = (
    KeyRow(
        "value_loss_fn.cliprange",
        "algorithm.critic.value_clip",
        convert=_with_critic(_value_clip),
        default=0,
        null=None,
    ),
    KeyRow("value_loss_fn.scale", note="the value loss has weight 1 here", convert=_value_scale),
    KeyRow(
        "ppo.policy_training_start_step",
        "algorithm.critic.warmup_steps",
        convert=_with_critic(lambda value, config: numbers.whole(value, least=0)),
    ),
    KeyRow(
        "value.model_name",
        note="the critic starts from the policy's model here",
        convert=_critic_model,
    ),
    KeyRow(
        "value.optimizer.kwargs.lr",
        "algorithm.critic.lr",
        convert=_with_critic(_when_critic_megatron(False, number)),
    ),
    KeyRow(
        f"{VALUE_MEGATRON}.optimizer.lr",
        "algorithm.critic.lr",
        convert=_with_critic(_when_critic_megatron(True, number)),
    ),
    KeyRow(f"{VALUE_MEGATRON}.enabled", covered_by=f"{VALUE_MEGATRON}.optimizer.lr"),
    *(
        KeyRow(f"value.{name}", note=to.SHARED_NOTE, convert=to.like_policy(name, "the critic"))
        for name in CRITIC_SETTINGS
    ),
    *(
        KeyRow(
            f"value.{name}",
            note=to.SHARED_NOTE,
            convert=_when_critic_megatron(condition, to.like_policy(name, "the critic")),
        )
        for condition, names in ((False, CRITIC_DTENSOR_SETTINGS), (True, CRITIC_MEGATRON_SETTINGS))
        for name in names
    ),
    *dropped("the critic starts from the policy's model here", "ppo.warm_start_value_checkpoint"),
    *no_effect("the critic reads the policy's tokens", "value.tokenizer.*"),
    *no_effect("the critic has a scalar head here, without settings", "value.reward_model_cfg.*"),
    *no_effect(
        shared.MICRO_BATCHES,
        "value.train_micro_batch_size",
        "value.logprob_batch_size",
        "value.dynamic_batching.*",
    ),
    *no_effect(
        shared.PACKING, "value.sequence_packing.*", "value.make_sequence_length_divisible_by"
    ),
    *section_rows("value"),
    *switches(
        "the critic runs on the policy's learner, and has its settings except the learning rate",
        "value.*",
    ),
)
PPO = (
    *ADVANTAGES,
    KeyRow("ppo.ppo_epochs", "algorithm.epochs", convert=whole, default=4),
    KeyRow(
        "ppo.critic_ppo_epochs", note="algorithm.epochs is this number here", convert=_critic_epochs
    ),
    *CRITIC,
    # This row follows the keys of the critic, because raw_reward removes the critic.
    KeyRow(f"{ESTIMATOR}.name", "algorithm.kind", convert=_estimator, default="gae"),
    *rollout_rows("ppo", prompts=32, attempts=16),
    *reward_rows("ppo"),
    *LOSS,
    *common_rows("ppo"),
)
