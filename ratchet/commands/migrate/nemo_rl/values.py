"""Convert values that several of NeMo RL's trainers have to values of a recipe.

A function of (value, config) converts the key of a row. "there" in a note means NeMo RL; "here"
means Ratchet.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from ratchet.commands.migrate import numbers, shared
from ratchet.commands.migrate.nemo_rl.placement import DTENSOR, MEGATRON, uses_megatron
from ratchet.commands.migrate.table import Conversion, Dropped, Inert, PeerConfig, Values, only_if
from ratchet.data.presets.datasets import BOXED_REQUEST, PRESETS
from ratchet.data.row_filters import COLUMN_IN_BRACES

WARMUP_NOTE = (
    "the warm-up counts passes over a batch there and optimizer steps here (x minibatches)"
)
# The note of rows that `like_policy` converts.
SHARED_NOTE = "it has the policy's setting here"
ADAPTER_NOTE = "this detail of the adapter has no key here"
# The LoRA sections of the DTensor and the Megatron learner.
ADAPTERS = (f"{DTENSOR}.lora_cfg", f"{MEGATRON}.peft")
# The sections of the trainers that sample.
SAMPLING_SECTIONS = ("grpo", "ppo", "distillation")


def tokenizer(value: Any, config: PeerConfig) -> Any:
    return (
        Inert("the model's own tokenizer is the default here")
        if value == config["policy.model_name"]
        else value
    )


def updates_per_batch(section: str, config: PeerConfig) -> int:
    """Return the number of optimizer steps per batch; `section` holds the trainer's own keys."""
    answers = config.whole(f"{section}.num_prompts_per_step") * config.whole(
        f"{section}.num_generations_per_prompt"
    )
    return numbers.quotient(
        answers,
        config.whole("policy.train_global_batch_size"),
        "a batch over train_global_batch_size",
    )


def minibatches(section: str) -> Conversion:
    return lambda value, config: updates_per_batch(section, config)


def batches(value: Any, config: PeerConfig) -> int:
    """Return the number of optimizer steps for a number of passes over a batch.

    NeMo RL's scheduler counts these passes. A file without batch sizes counts as one optimizer step
    per pass.
    """
    section = next(
        (
            name
            for name in SAMPLING_SECTIONS
            if config[f"{name}.num_prompts_per_step"] is not None
            and config["policy.train_global_batch_size"] is not None
        ),
        None,
    )
    return numbers.whole(value, least=0) * (updates_per_batch(section, config) if section else 1)


def _counts_steps(section: str, config: PeerConfig) -> bool:
    """True unless `max_num_steps` is unset, or so large that `max_num_epochs` ends training."""
    steps = config[f"{section}.max_num_steps"]
    epochs = config[f"{section}.max_num_epochs"]
    count = 0 if steps is None else numbers.number(steps)
    if count <= 0:
        return False
    if epochs is None or count < shared.UNLIMITED_STEPS:
        return True
    # If both numbers are that large, the steps end first, because a pass has at least one step.
    return not 0 < numbers.number(epochs) < shared.UNLIMITED_STEPS


def steps(section: str) -> Conversion:
    def convert(value: Any, config: PeerConfig) -> Any:
        if _counts_steps(section, config):
            return numbers.whole(value)
        return Inert("max_num_epochs ends training there")

    return convert


def passes(section: str) -> Conversion:
    def convert(value: Any, config: PeerConfig) -> Any:
        if _counts_steps(section, config):
            return Dropped("max_num_steps sets the length: set passes instead if they end first")
        return shared.passes(value)

    return convert


def warmup(value: Any, config: PeerConfig) -> Any:
    """Convert a chain of torch's schedulers: a warm-up, then a constant rate or a cosine.

    An item of the chain without a name has `milestones`: the steps at which the next scheduler
    begins. A note says so if this is not the end of the warm-up.
    """
    chain = value if isinstance(value, list) else [value]
    parts = [part for part in chain if isinstance(part, Mapping)]
    # The arguments of each scheduler, by the name of its class.
    kwargs = {
        str(part["name"]).rpartition(".")[2]: part.get("kwargs") or {}
        for part in parts
        if "name" in part
    }
    values: dict[str, Any] = {}
    notes = [WARMUP_NOTE]
    if "LinearLR" in kwargs:
        values["optimizer.warmup_steps"] = batches(kwargs["LinearLR"].get("total_iters", 5), config)
        start = numbers.number(kwargs["LinearLR"].get("start_factor", 1 / 3), "start_factor")
        notes.append(f"the learning rate rises from 0 here, from {start:g} x lr there")
        if numbers.number(kwargs["LinearLR"].get("end_factor", 1.0), "end_factor") != 1:
            return Dropped(
                "the schedule has an end_factor other than 1: set optimizer.lr, warmup_steps and "
                "schedule"
            )
    if "CosineAnnealingLR" in kwargs:
        values["optimizer.schedule"] = "cosine"
        values["optimizer.min_lr_ratio"] = _min_lr_ratio(
            kwargs["CosineAnnealingLR"].get("eta_min", 0), config
        )
        notes.append(
            "the cosine ends with the last step here, after "
            f"T_max={kwargs['CosineAnnealingLR'].get('T_max')} batches there"
        )
    if (
        "ConstantLR" in kwargs
        and numbers.number(kwargs["ConstantLR"].get("factor", 1 / 3), "factor") != 1
    ):
        return Dropped(
            "the schedule has a ConstantLR with a factor other than 1: set optimizer.lr, "
            "warmup_steps and schedule"
        )
    if set(kwargs) == {"ConstantLR"}:
        return Inert("a constant learning rate is the default here")
    if set(kwargs) - {"LinearLR", "ConstantLR", "CosineAnnealingLR"} or not values:
        return Dropped(
            "set optimizer.warmup_steps and optimizer.schedule (constant, linear, cosine or wsd)"
        )
    milestones = [end for part in parts if "name" not in part for end in part.get("milestones", ())]
    if milestones and [numbers.whole(end, "milestones") for end in milestones] != [
        _total_iters(kwargs.get("LinearLR", {}).get("total_iters"))
    ]:
        notes.append(
            f"milestones {milestones} are not the end of the warm-up, at which the next schedule "
            "begins here"
        )
    return Values(values, "; ".join(notes))


def _total_iters(value: Any) -> Any:
    """Return the `total_iters` of a scheduler, None if it is not set."""
    return value if value is None else numbers.whole(value, "total_iters")


def _min_lr_ratio(value: Any, config: PeerConfig) -> Any:
    """Return the ratio of a cosine's last learning rate to its first."""
    end = numbers.number(value, "eta_min")
    return end / config.number("policy.optimizer.kwargs.lr") if end else 0.0


def optimizer(value: Any, config: PeerConfig) -> Any:
    name = str(value).rpartition(".")[2].lower()
    if name == "adam" and config["policy.optimizer.kwargs.weight_decay"]:
        return Values({"optimizer.kind": "adamw"}, "weight decay is decoupled here (AdamW)")
    return (
        "adamw"
        if name in ("adamw", "adam")
        else Dropped("optimizer.kind has adamw, adamw8bit and muon")
    )


def lora(convert: Conversion | None, section: str) -> Conversion:
    """Return the conversion, limited to files that enable LoRA in a section of ADAPTERS."""
    is_megatron = section.startswith(MEGATRON)
    return only_if(
        lambda config: config.flag(f"{section}.enabled") and uses_megatron(config) == is_megatron,
        convert,
        f"{section.rpartition('.')[2]} is not enabled there",
    )


def targets(section: str) -> Conversion:
    """Return the conversion of the modules that get an adapter."""

    def convert(value: Any, config: PeerConfig) -> Any:
        key = f"{section}.match_all_linear"
        has_switch = section == ADAPTERS[0]
        matches_all = has_switch and (config[key] is None or config.flag(key))
        return "all-linear" if matches_all or not value else shared.as_list(value, config)

    return convert


def adapter_detail(value: Any, config: PeerConfig) -> Any:
    """Return why a detail of the adapter is not converted. Its usual value has no effect."""
    is_usual = value in ("post", "xavier", "zero", True, False) or value == []
    return Inert("it is the usual form of an adapter") if is_usual else Dropped(ADAPTER_NOTE)


def rows(value: Any, config: PeerConfig) -> Any:
    """Convert the training data. The path of a data file overrides `value`, a dataset's name.

    Without a prompt file, NeMo RL's prompt is the question alone, so the preset's request for a
    boxed answer is left out.
    """
    data = shared.training_data(
        config["data.train.data_path"] or config["data.train_data_path"] or value, config
    )
    preset = PRESETS.get(data.values.get("environment.preset", ""))
    if preset and preset.prompt.endswith(BOXED_REQUEST) and not config["data.default.prompt_file"]:
        question = preset.prompt.removesuffix(BOXED_REQUEST)
        return Values({**data.values, "environment.prompt": question}, data.note)
    return data


def prompt(value: Any, config: PeerConfig) -> Any:
    """Convert the file with the text around a question, in which {} stands for the question."""
    path = config.find_file(str(value))
    name = config["data.train.dataset_name"] or config["data.dataset_name"]
    preset = shared.find_preset(str(name))
    column = "prompt" if preset is None else preset.columns.get("prompt", "")
    if path is None or not column:
        return Dropped(
            "set environment.prompt to the text around a question: '{problem}\nThink first.'"
        )
    fields = list(Formatter().parse(path.read_text(encoding="utf-8")))
    text = "".join(f"{literal}\0" if name is not None else literal for literal, name, *_ in fields)
    # {{answer}} is the word in braces there. Here it would be the column of that name.
    if any(name for _, name, *_ in fields) or COLUMN_IN_BRACES.search(text.replace("{\0}", "")):
        return Dropped(
            "it has a word in braces, which would be a column of the data here: set "
            "environment.prompt by hand"
        )
    return text.replace("\0", f"{{{column}}}")


def system_prompt(value: Any, config: PeerConfig) -> Any:
    """Convert the file with the system prompt."""
    path = config.find_file(str(value))
    if path is None:
        return Dropped("set environment.system to the text of the system prompt")
    return path.read_text(encoding="utf-8")


def sampled_evaluation(section: str) -> Conversion:
    """Return the conversion of evaluation's temperature, which also sets its answers per task."""

    def convert(value: Any, config: PeerConfig) -> Any:
        temperature = numbers.real(value)
        if not temperature:
            return Inert("evaluation is greedy here too")
        settings = {
            "greedy": False,
            "samples": config.whole(f"{section}.val_num_generations_per_prompt", 1),
            "temperature": temperature,
        }
        return Values({f"evaluation.{key}": setting for key, setting in settings.items()})

    return convert


def column(column_name: str) -> Conversion:
    """Return a conversion of the data's name for the environment's column `column_name`."""
    return lambda value, config: Values({f"environment.columns.{column_name}": value})


def convert_project(tracker: str) -> Conversion:
    """Return a conversion of a tracker's switch, which sets all enabled trackers."""

    def convert(value: Any, config: PeerConfig) -> Any:
        trackers = [name for name in shared.TRACKERS if config.flag(f"logger.{name}_enabled")]
        if not numbers.flag(value):
            return Inert("it is off there")
        project = {
            name: config[f"logger.{name}.project"] or config[f"logger.{name}.experiment_name"]
            for name in trackers
        }
        return [
            {
                "kind": name,
                **(
                    {"experiment" if name == "mlflow" else "project": project[name]}
                    if project[name]
                    else {}
                ),
            }
            for name in trackers
        ]

    return convert


def sft_coef(value: Any, config: PeerConfig) -> float:
    """Return the coefficient of the SFT loss relative to the preference loss."""
    return numbers.number(value) / config.number("dpo.preference_loss_weight")


def like_policy(name: str, model: str) -> Conversion:
    """Return a conversion of a setting that a teacher or critic shares with the policy here.

    Args:
        name: The key of the setting in the section of either model.
        model: The other model, as notes name it.
    """

    def convert(value: Any, config: PeerConfig) -> Any:
        if value == config[f"policy.{name}"]:
            return Inert(f"{model} has the policy's setting here, which is the same")
        return Dropped(f"{model} has the policy's setting here, not one of its own")

    return convert
