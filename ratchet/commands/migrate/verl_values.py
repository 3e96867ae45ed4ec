"""Convert the values of verl's keys to values of a recipe.

Each function of (value, config) converts one key of the table in the module `verl`. "there" in a
note means verl; "here" means Ratchet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import numbers, shared
from ratchet.commands.migrate.numbers import InvalidValue
from ratchet.commands.migrate.table import Conversion, Dropped, Inert, PeerConfig, Values, choose

ARR = "actor_rollout_ref"
CORRECTION = "algorithm.rollout_correction"
ACTOR = f"{ARR}.actor"
ROLLOUT = f"{ARR}.rollout"
MODEL = f"{ARR}.model"
ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"algorithm.kind": "grpo"},
    "gae": {"algorithm.kind": "ppo", "algorithm.advantage.bootstrap": False},
    "rloo": {"algorithm.kind": "rloo"},
    "reinforce_plus_plus": {"algorithm.kind": "reinforce_pp"},
    "reinforce_plus_plus_baseline": {
        "algorithm.kind": "reinforce_pp",
        "algorithm.advantage.baseline": "group",
    },
    "remax": {"algorithm.kind": "remax"},
    "opo": {"algorithm.kind": "opo"},
    "gdpo": {"algorithm.kind": "gdpo"},
}


def uses_gae(config: PeerConfig) -> bool:
    return config["algorithm.adv_estimator"] == "gae"


def choose_estimator(value: Any, config: PeerConfig) -> Any:
    note = (
        "truncated attempts are not bootstrapped, as in verl (bootstrap: false); by default "
        "Ratchet uses the critic's estimate"
        if value == "gae"
        else ""
    )
    return Values(ESTIMATORS[value], note)


def loss_mode(value: Any, config: PeerConfig) -> Any:
    if value == "sapo":
        taus = {
            f"algorithm.loss.tau_{sign}": config.number(f"{ACTOR}.tau_{sign}")
            for sign in ("pos", "neg")
        }
        return Values({"algorithm.loss.kind": "sapo", **taus})
    if value == "gpg":
        return Values({"algorithm.loss.kind": "reinforce"})
    kind = {"vanilla": "ppo", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo"}.get(value)
    if kind is None:
        return Dropped(
            "it has no counterpart: algorithm.loss can be ppo, gspo, cispo, sapo, gmpo, reinforce, "
            "topr or kimi"
        )
    low, high = (_clip_ratio(f"{ACTOR}.clip_ratio_{side}", config) for side in ("low", "high"))
    # With a clip ratio of 1 or more, CISPO has no lower bound.
    clip_low = low if kind != "cispo" or low < 1 else None
    return Values(
        {
            "algorithm.loss.kind": kind,
            "algorithm.loss.clip_low": clip_low,
            "algorithm.loss.clip_high": high,
        }
    )


def _clip_ratio(key: str, config: PeerConfig) -> int | float:
    """Return the clip ratio of one side, or `clip_ratio` if it is null."""
    return config.number(f"{ACTOR}.clip_ratio" if config[key] is None else key)


def aggregation(value: Any, config: PeerConfig) -> Any:
    step_mean = (
        "the mean is over the whole optimizer step here, and over each micro-batch in older "
        "versions of verl"
    )
    mode = config[f"{ACTOR}.policy_loss.loss_mode"]
    if mode in ("gspo", "sapo"):
        return Values(
            {"algorithm.weighting": "sequence_mean"},
            f"{mode} always takes the mean over answers there",
        )
    if value == "token-mean":
        return Values({"algorithm.weighting": "token_mean"}, step_mean)
    if value == "seq-mean-token-mean":
        return Values({"algorithm.weighting": "sequence_mean"}, step_mean)
    if value == "seq-mean-token-sum":
        return Values(
            {"algorithm.weighting": "token_sum"},
            "the loss is the sum over tokens, divided by the number of answers, so that longer "
            "answers give larger steps",
        )
    if value == "seq-mean-token-sum-norm":
        factor = f"{ACTOR}.loss_scale_factor"
        length = config.whole("data.max_response_length" if config[factor] is None else factor)
        return Values(
            {"algorithm.weighting": "fixed_length", "algorithm.fixed_length": length},
            "the divisor is loss_scale_factor, or else max_response_length (Dr. GRPO)",
        )
    return Dropped(
        "algorithm.weighting has token_mean, sequence_mean, prompt_mean, token_sum and fixed_length"
    )


def kl_loss(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value):
        return Inert("the loss is off there, and algorithm.kl.coef is 0 here by default")
    coef = numbers.real(config[f"{ACTOR}.kl_loss_coef"], f"{ACTOR}.kl_loss_coef")
    kind = config[f"{ACTOR}.kl_loss_type"]
    if not coef:
        return Values({"algorithm.kl.coef": 0.0})
    if kind in ("low_var_kl", "k3"):
        return Values(
            {"algorithm.kl.coef": coef, "algorithm.kl.objective": "forward"}, shared.KL_FORWARD
        )
    if kind in ("low_var_kl+", "k3+", "kl+", "k1+", "mse", "k2"):
        estimator = "k2" if kind in ("mse", "k2") else "k3"
        return Values(
            {"algorithm.kl.coef": coef, "algorithm.kl.estimator": estimator},
            "the loss has the gradient of KL(policy || reference), as there",
        )
    if kind not in ("kl", "k1", "abs"):
        return Dropped(f"{ACTOR}.kl_loss_type={kind} is not known here: set algorithm.kl")
    note = (
        "here the gradient is that of the reverse KL. In verl the loss has the gradient of no "
        f"divergence (kl_loss_type={kind}; for kl the expected gradient is 0)"
    )
    return Values({"algorithm.kl.coef": coef}, note)


def kl_reward(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value):
        return Inert("it is off there, and here by default")
    coef = numbers.real(config["algorithm.kl_ctrl.kl_coef"], "algorithm.kl_ctrl.kl_coef")
    kl_keys: dict[str, Any] = {"algorithm.kl.coef": coef, "algorithm.kl.place": "reward"}
    kind = config["algorithm.kl_ctrl.type"]
    if kind not in ("fixed", "adaptive"):
        return Dropped(f"algorithm.kl_ctrl.type={kind} is not known here: set algorithm.kl")
    if kind == "adaptive":
        kl_keys["algorithm.kl.target"] = config.number("algorithm.kl_ctrl.target_kl")
    return Values(
        kl_keys,
        "the penalty here is always k1 of each token, whatever kl_penalty is in verl; target is in "
        "nats per token",
    )


def minibatches(value: Any, config: PeerConfig) -> int:
    prompts_per_step = numbers.whole(value, f"{ACTOR}.ppo_mini_batch_size", 1)
    return numbers.quotient(
        config.whole("data.train_batch_size"),
        prompts_per_step,
        "train_batch_size over ppo_mini_batch_size",
    )


def updates_per_batch(config: PeerConfig) -> int:
    """Return the optimizer steps per batch, because verl's scheduler counts batches."""
    return minibatches(config[f"{ACTOR}.ppo_mini_batch_size"], config) * config.whole(
        f"{ACTOR}.ppo_epochs"
    )


def warmup(value: Any, config: PeerConfig) -> Any:
    steps = numbers.whole(value)
    if steps <= 0:
        return Inert("it is not above 0 there, so lr_warmup_steps_ratio counts")
    return Values(
        {"optimizer.warmup_steps": steps * updates_per_batch(config)},
        "the warm-up counts batches there and optimizer steps here",
    )


def warmup_ratio(value: Any, config: PeerConfig) -> Any:
    key = f"{ACTOR}.optim.lr_warmup_steps"
    if config[key] is not None and config.whole(key, least=-1) > 0:
        return Inert("lr_warmup_steps overrides this key")
    steps = (
        None
        if config["trainer.total_training_steps"] is None
        else config.whole("trainer.total_training_steps")
    )
    return shared.warmup_share(
        value, steps, math.floor, factor=1 if steps is None else updates_per_batch(config)
    )


def passes(value: Any, config: PeerConfig) -> Any:
    key = "trainer.total_training_steps"
    return (
        Inert(shared.OVERRIDDEN.format(key=key))
        if config[key] is not None
        else shared.passes(value)
    )


def schedule(value: Any, config: PeerConfig) -> Any:
    """Convert a schedule. verl's cosine has `num_cycles` periods; Ratchet's has half a period."""
    if value == "cosine" and config[f"{ACTOR}.optim.num_cycles"] not in (None, 0.5):
        return Dropped("num_cycles is not half a period: set optimizer.schedule")
    return choose({"constant": "constant", "cosine": "cosine"})(value, config)


def count_gpus(config: PeerConfig) -> int:
    return config.whole("trainer.n_gpus_per_node") * config.whole("trainer.nnodes")


def engine(config: PeerConfig) -> Any:
    """Return the training engine: actor.strategy, else model_engine, else that of --config-name."""
    if config.values.get(f"{ACTOR}.strategy") is not None:
        return config[f"{ACTOR}.strategy"]
    chosen = config["model_engine"]
    if chosen is not None:
        return "fsdp" if chosen == "dp" else chosen
    base = config["--config-name"]
    return (
        "megatron" if base is not None and "megatron" in str(base) else config[f"{ACTOR}.strategy"]
    )


def learner(value: Any, config: PeerConfig) -> Any:
    """Convert the training engine. It gets all accelerators, as in verl's hybrid engine."""
    value = engine(config)
    quotient_meaning = "the accelerators over the learner's parallel sizes"
    if value in ("fsdp", "fsdp2"):
        if count_gpus(config) == 1:
            return Values(
                {"learner.kind": "local"},
                "one accelerator: the learner runs in the main process",
            )
        context = config.whole(f"{ACTOR}.ulysses_sequence_parallel_size", 1)
        sizes = {
            "learner.dp_shard": numbers.quotient(count_gpus(config), context, quotient_meaning),
            **({"learner.context_parallel": context} if context > 1 else {}),
        }
        return Values(
            {"learner.kind": "dtensor", **sizes},
            "dp_shard is the number of ranks over which rows and weights are sharded",
        )
    if value != "megatron":
        return Dropped("learner.kind is local, dtensor (FSDP2) or megatron here")
    sizes_by_key = {
        f"{part}_parallel": config.whole(f"{ACTOR}.megatron.{part}_model_parallel_size", 1)
        for part in ("tensor", "pipeline", "expert")
    }
    sizes_by_key["context_parallel"] = config.whole(f"{ACTOR}.megatron.context_parallel_size", 1)
    ranks_per_replica = (
        sizes_by_key["tensor_parallel"]
        * sizes_by_key["pipeline_parallel"]
        * sizes_by_key["context_parallel"]
    )
    sizes = {f"learner.{part}": size for part, size in sizes_by_key.items() if size > 1}
    return Values(
        {
            "learner.kind": "megatron",
            "learner.data_parallel": numbers.quotient(
                count_gpus(config), ranks_per_replica, quotient_meaning
            ),
            **sizes,
        }
    )


def generator(value: Any, config: PeerConfig) -> Any:
    if value not in ("vllm", "hf"):
        return Dropped(
            "generator.kind is engine, vllm or hf here: the recipe uses the built-in engine instead"
        )
    if value == "hf":
        return Values({"generator.kind": "hf"})
    tensor_parallel = config.whole(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    replicas = max(1, count_gpus(config) // tensor_parallel)
    keys: dict[str, Any] = {"kind": "vllm", "tensor_parallel": tensor_parallel}
    for their_key, recipe_key in (
        ("max_model_len", "max_context"),
        ("max_num_seqs", "max_running"),
    ):
        if config[f"{ROLLOUT}.{their_key}"] is not None:
            keys[recipe_key] = config.whole(f"{ROLLOUT}.{their_key}")
    if replicas > 1:
        keys = {"kind": "workers", "workers": replicas, "worker": keys}
    return Values(
        {"generator": keys, "cluster.colocated": True}, "learner and vLLM are colocated, as there"
    )


def nodes(value: Any, config: PeerConfig) -> Any:
    count = numbers.whole(value, least=1)
    if count == 1:
        return Inert("one node: cluster.kind=local uses all its accelerators")
    return Values(
        {
            "cluster.kind": "ray",
            "cluster.nodes": count,
            "cluster.gpus_per_node": config.whole("trainer.n_gpus_per_node"),
        }
    )


def files(value: Any, config: PeerConfig) -> Any:
    columns = {
        "environment.columns.prompt": config["data.prompt_key"],
        "environment.columns.answer": "reward_model.ground_truth",
    }
    training_data = shared.training_data(value, config)
    return Values(
        {**training_data.values, **columns},
        "; ".join(
            filter(None, ["environment.columns names the columns there", training_data.note])
        ),
    )


def overlong_penalty(section: str, length: str) -> Conversion:
    """Return the conversion of DAPO's overlong penalty.

    Args:
        section: Prefix of the penalty's keys, which differs between versions of verl.
        length: verl's key of the maximum length of an answer.
    """

    def convert(value: Any, config: PeerConfig) -> Any:
        if not numbers.flag(value):
            return Inert("it is off there")
        longest = config.whole("data.max_response_length" if config[length] is None else length)
        factor = config[f"{section}.penalty_factor"]
        penalty = {
            "kind": "overlong_penalty",
            "max_length": longest,
            "buffer": config.whole(f"{section}.len"),
            "factor": 1.0 if factor is None else numbers.real(factor, f"{section}.penalty_factor"),
        }
        return Values(
            {"algorithm.shaping": [penalty]},
            "the penalty is at least -factor here (DAPO, eq. 13); there it falls with the length",
        )

    return convert


def weight(value: Any, config: PeerConfig) -> Any:
    """Convert importance weights. `rollout_is_threshold` is an upper bound, or both: "0.5_2.0".

    If there are two bounds, verl sets weights outside of them to 0 (IcePop).
    """
    if value is False:
        return Inert("it is off there")
    if value not in ("token", "sequence"):
        return Dropped("only token and sequence are converted to algorithm.correction.weight")
    threshold = config[f"{CORRECTION}.rollout_is_threshold"]
    if threshold is None:
        return Dropped("rollout_is_threshold is null there, so there are no weights")
    low, high = numbers.bounds(threshold, f"{CORRECTION}.rollout_is_threshold")
    if low is None:
        return Values(
            {"algorithm.correction.weight": value, "algorithm.correction.weight_high": high}
        )
    if config[f"{CORRECTION}.rollout_rs"] is not None:
        raise InvalidValue(
            f"{CORRECTION}.rollout_is_threshold and rollout_rs are two masks, but Ratchet has one: "
            "remove one of them"
        )
    mask_keys = {
        "weight": value,
        "weight_high": None,
        "mask": value,
        "mask_low": low,
        "mask_high": high,
        "mask_denominator": "all",
    }
    return Values({f"algorithm.correction.{key}": content for key, content in mask_keys.items()})


MASKS: Mapping[str, str] = {
    "token_k1": "token",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
}
OLDER_MASKS = ("token", "sequence", "geometric")


def mask(value: Any, config: PeerConfig) -> Any:
    """Convert rejection sampling. verl's k1 is -log(ratio): its bounds are inverted here.

    The names without k1 are from older versions and bound the ratio itself.
    """
    names = list(dict.fromkeys(part.strip() for part in str(value).split(",") if part.strip()))
    if value is False or not names:
        return Inert("it is off there")
    level = MASKS.get(names[0], names[0] if names[0] in OLDER_MASKS else None)
    if len(names) > 1 or level is None:
        return Dropped(
            f"algorithm.correction.mask can only be one of {', '.join(MASKS)}: k2 and k3 are no "
            "bounds of a ratio"
        )
    key = f"{CORRECTION}.rollout_rs_threshold"
    if config[key] is None:
        raise InvalidValue(
            f"{key} is not set, and rollout_rs needs it: set algorithm.correction.mask by hand"
        )
    low, high = numbers.bounds(config[key], key)
    if names[0] in MASKS:
        low, high, note = (
            1 / high,
            high if low is None else 1 / low,
            "the bounds are on the ratio here, and on 1/ratio there (k1 is -log ratio)",
        )
    else:
        lower_key = f"{key}_lower"
        low = 1 / high if config[lower_key] is None else numbers.real(config[lower_key], lower_key)
        note = "the bounds become mask_low and mask_high"
    mask_keys = {"mask": level, "mask_low": low, "mask_high": high, "mask_denominator": "kept"}
    if config[f"{CORRECTION}.rollout_is"] in (None, False):
        mask_keys["weight"] = "none"
    return Values(
        {f"algorithm.correction.{key}": content for key, content in mask_keys.items()}, note
    )


def uses_grpo(config: PeerConfig) -> bool:
    return config["algorithm.adv_estimator"] == "grpo"


def is_not_megatron(config: PeerConfig) -> bool:
    return engine(config) != "megatron"


def is_distributed(config: PeerConfig) -> bool:
    return count_gpus(config) > 1 and is_not_megatron(config)


def reward_model(path: str) -> Conversion:
    def convert(value: Any, config: PeerConfig) -> Any:
        if not numbers.flag(value):
            return Inert("it is off there")
        if config[path] is None:
            raise InvalidValue(f"needs {path}, which is not set: set rewards by hand")
        return Values({"rewards": [{"kind": "reward_model", "path": str(config[path])}]})

    return convert


def custom_reward(prefix: str) -> Conversion:
    """Return the conversion of the path of a user's reward function."""

    def convert(value: Any, config: PeerConfig) -> Any:
        arguments = shared.collect_keys(f"{prefix}.reward_kwargs.")(value, config)
        path = f"{str(value).removeprefix('file://')}:{config[f'{prefix}.name'] or 'compute_score'}"
        keys = {"reward_kwargs": arguments} if arguments else {}
        return Values(
            {"rewards": [shared.make_user_reward("verl", path, **keys)]}, shared.KEPT_FUNCTION
        )

    return convert


def max_replaced(value: Any, config: PeerConfig) -> int:
    """Return the maximum number of batches of replacements; no limit (0 in verl) becomes 1000."""
    count = numbers.whole(value)
    return count if count > 0 else 1000


def uses_lora(config: PeerConfig) -> bool:
    return config.whole(f"{MODEL}.lora_rank", 0, least=0) > 0


def betas(value: Any, config: PeerConfig) -> list[int | float]:
    return [numbers.number(beta, f"{ACTOR}.optim.betas") for beta in shared.as_list(value, config)]


def samples(value: Any, config: PeerConfig) -> int:
    """Return the number of sampled attempts; a single one becomes the greedy attempt."""
    count = numbers.whole(value, least=0)
    return count if count > 1 else 0


def eval_temperature(value: Any, config: PeerConfig) -> Any:
    temperature = numbers.real(value)
    if temperature < 0:
        raise InvalidValue(
            f"is {temperature}, and not a temperature: set evaluation.temperature by hand"
        )
    return temperature or Inert("it is 0 there, like the greedy attempt, which is always made here")
