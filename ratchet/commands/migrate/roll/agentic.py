"""Convert the environments of ROLL's agentic pipeline: its games, and gem's environments by id.

"there" in a note means ROLL; "here" means Ratchet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.numbers import InvalidValue
from ratchet.commands.migrate.table import Dropped, Inert, PeerConfig, Values

KIND = ".env_type"  # the key by which a definition is known
REFERENCE = re.compile(r"custom_envs\.[^.]+")  # the name of a definition that stands elsewhere
WALLS = 2  # cells on a side that ROLL counts as the room's outer walls
ROOM_SIDES = range(5, 13)
# Environment managers whose episodes are played alike, and what their class sets.
TURNS, IMAGES, WINDOW = "TrajEnvManager", "VLTrajEnvManager", "StepEnvManager"
JOINED = "StepConcatEnvManager"
GAME_NOTES = {
    "sokoban": "the last box on its goal earns 1; there it pays 10, a box on its goal 1, and each "
    "step costs 0.1. Rooms are drawn by another rule, and the rules are told in other words",
    "frozen_lake": "the rules are told in other words",
}
# The remedy for each of ROLL's environments that has no counterpart under the same name.
FIXES: Mapping[str, str] = {
    "roll_math": "Write a recipe with environment.kind=gem.",
    "roll_qa": "Write a recipe with environment.kind=gem, or qa with a retriever.",
    "webshop": "Serve WebShop by OpenEnv's protocol (environment.kind=openenv); "
    "environment.kind=shop is like it, with other data.",
    "deepeyes": "Write an environment whose tool answers with images (docs/environments.md).",
    "atropos_env": "Ratchet has no client of Atropos.",
    "openreward_env": "Write a recipe with environment.kind=open_reward.",
    "rock_tb_native_env": "It needs ROCK's sandboxes: environment.kind=harbor plays such tasks in "
    "containers.",
    "sokoban_sandbox": "It needs ROCK's sandboxes: environment.kind=sokoban plays without them.",
    "sokoban_native_env": "It needs ROCK's sandboxes: environment.kind=sokoban plays without them.",
}
BY_HAND = "Choose environment.kind by hand (`ratchet help environment`)."


def keep_used_definitions(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values without the environments that no tag of the file names.

    Files include definitions of many environments, as `custom_env` or under other names, and refer
    to some of them in `custom_envs`. Those that are used are returned under that name.
    """
    roles = ("train_env_manager.tags", "val_env_manager.tags")
    used = {tag for key in roles for tag in _list_tags(values.get(key))}
    if not used:
        return values
    definitions = {key.removesuffix(KIND) for key in values if key.endswith(KIND)}
    kept: dict[str, Any] = {}
    for key, value in values.items():
        root = next((name for name in definitions if key.startswith(f"{name}.")), None)
        if root is None:
            if not REFERENCE.fullmatch(key):
                kept[key] = value
        elif (tag := root.rpartition(".")[2]) in used:
            kept[f"custom_envs.{tag}{key.removeprefix(root)}"] = value
    return kept


def describe_environments(values: Mapping[str, Any]) -> str | None:
    """Return sentences on environments that are not converted; None if all of training's are.

    Without this refusal the recipe would train on questions in their place.

    Args:
        values: The values that `keep_used_definitions` returns.
    """
    config = PeerConfig(values, {})
    problems: dict[str, str] = {}
    value = config["train_env_manager.tags"]
    tags = _list_tags(value)
    for tag in tags:
        try:
            _convert_tag(tag, config)
        except InvalidValue as problem:
            problems[_get_kind(tag, config)] = str(problem)
    if tags and not problems:
        try:
            convert_training(value, config)
        except InvalidValue as problem:
            return f"the run's environments are not converted. {problem}."
        return None
    sentences = sorted({f"{problem.removesuffix('.')}." for problem in problems.values()})
    return (
        f"the run plays ROLL's environment {', '.join(sorted(problems)) or 'train_env_manager'}, "
        f"which is not converted. {' '.join(sentences) or BY_HAND}"
    )


def convert_training(value: Any, config: PeerConfig) -> Values:
    """Convert the environments of training, with what their managers set."""
    tags = _list_tags(value)
    sections = [_convert_tag(tag, config) for tag in tags]
    result: dict[str, Any] = {"environment": _mix(tags, sections, "train", config)}
    if not any(key.startswith("rewards.") for key in config.values):
        result["rewards"] = []  # an environment judges its own steps
    windows = {_get_window(tag, config) for tag in tags}
    if len(windows) > 1:
        raise InvalidValue("the environments have different histories. Choose one")
    if window := windows.pop():
        result["rollouts.history_window"] = window
    turns = [_get_steps(tag, config) for tag in tags if ":" in _get_kind(tag, config)]
    if turns:
        result["rollouts.max_turns"] = max(turns)
    keys = [f"custom_envs.{tag}.max_tokens_per_step" for tag in tags]
    keys.append("actor_infer.generating_args.max_new_tokens")
    tokens = [numbers.whole(config[key], key) for key in keys if config[key] is not None]
    if tokens:
        result["sampling.max_new_tokens"] = min(tokens)
    notes = {GAME_NOTES.get(_get_kind(tag, config), "") for tag in tags} - {""}
    return Values(result, "; ".join(sorted(notes)))


def convert_evaluation(value: Any, config: PeerConfig) -> Values:
    """Convert the environments of evaluation."""
    tags = _list_tags(value)
    sections = [_convert_tag(tag, config) for tag in tags]
    return Values({"evaluation.environment": _mix(tags, sections, "val", config)})


def convert_group_size(value: Any, config: PeerConfig) -> Values:
    """Convert a group's size, by which ROLL's batch of attempts is a number of groups here."""
    size = numbers.whole(value)
    groups = numbers.quotient(
        config.whole("rollout_batch_size"), size, "a batch's attempts over those of a group"
    )
    return Values({"algorithm.group_size": size, "batch_size": groups})


def inert_shares(value: Any, config: PeerConfig) -> Inert:
    """Return the result for shares that no mixture uses."""
    return Inert("one environment has all groups")


def convert_normalisation(value: Any, config: PeerConfig) -> Any:
    """Convert a key of reward_normalization, which grpo's own advantage may cover."""
    keys = ("adv_estimator", "reward_normalization.grouping", "reward_normalization.method")
    if [config[key] for key in keys] == ["grpo", "traj_group_id", "mean_std"]:
        return Inert("grpo's advantage is normalised over the group")
    return Dropped("algorithm.shaping has normalise (over group, batch or all batches so far)")


def _list_tags(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [str(tag) for tag in values]


def _get_kind(tag: str, config: PeerConfig) -> str:
    """Return the env_type of a tag; the tag itself if the file does not define it."""
    return str(config[f"custom_envs.{tag}.env_type"] or tag)


def _get_manager(tag: str, config: PeerConfig) -> str:
    return str(config[f"custom_envs.{tag}.env_manager_cls"] or TURNS).rpartition(".")[2]


def _get_window(tag: str, config: PeerConfig) -> int | None:
    """Return the number of earlier turns in a prompt; None for all of them."""
    if _get_manager(tag, config) != WINDOW:
        return None
    return config.whole(f"custom_envs.{tag}.history_length")


def _has_whole_history(tag: str, config: PeerConfig) -> bool:
    """True if every prompt has all earlier turns."""
    steps = _get_steps(tag, config)
    return steps == 1 or config.whole(f"custom_envs.{tag}.history_length", 0, 0) >= steps


def _get_steps(tag: str, config: PeerConfig) -> int:
    return config.whole(f"custom_envs.{tag}.max_steps")


def _convert_tag(tag: str, config: PeerConfig) -> dict[str, Any]:
    """Return the section of a tag's environment. Raises InvalidValue if there is none."""
    place, kind, manager = f"custom_envs.{tag}", _get_kind(tag, config), _get_manager(tag, config)
    is_game = kind in GAME_NOTES
    if not is_game and ":" not in kind:  # the names of gem's environments have a colon
        raise InvalidValue(FIXES.get(kind, BY_HAND))
    fix = f"Write a recipe with environment.kind={kind if is_game else 'gem'}"
    if any(key.startswith(f"{place}.tool_wrapper") for key in config.values):
        raise InvalidValue(f"{fix}, whose wrappers name a function that adds gem's tools.")
    if config[f"{place}.agent_runner_cls"] is not None:
        raise InvalidValue(f"{fix} and the agent of agent_runner_cls (docs/black-box-agents.md).")
    is_known = manager in (TURNS, WINDOW) or (manager == IMAGES and is_game)
    if not is_known and not (manager == JOINED and _has_whole_history(tag, config)):
        raise InvalidValue(f"{fix}: env_manager_cls={manager} has no counterpart.")
    if not is_game:
        start = f"{place}.env_config."
        kwargs = {
            key.removeprefix(start): config[key]
            for key in sorted(config.values)
            if key.startswith(start)
        }
        return {"kind": "gem", "id": kind, **({"kwargs": kwargs} if kwargs else {})}
    convert = _convert_sokoban if kind == "sokoban" else _convert_lake
    section = convert(place, fix, config)
    section["max_moves"] = _get_steps(tag, config)
    if manager == IMAGES or config[f"{place}.env_config.render_mode"] == "rgb_array":
        section["observation"] = "image"
    return section


def _convert_sokoban(place: str, fix: str, config: PeerConfig) -> dict[str, Any]:
    room = config[f"{place}.env_config.dim_room"] or [10, 10]
    if room not in [[side, side] for side in ROOM_SIDES]:
        raise InvalidValue(
            f"{fix}: dim_room={room} must be two equal numbers from {ROOM_SIDES[0]} to "
            f"{ROOM_SIDES[-1]}."
        )
    return {
        "kind": "sokoban",
        "size": numbers.whole(room[0], f"{place}.env_config.dim_room") - WALLS,
        "boxes": config.whole(f"{place}.env_config.num_boxes", 4),
    }


def _convert_lake(place: str, fix: str, config: PeerConfig) -> dict[str, Any]:
    start = f"{place}.env_config"
    ice = config[f"{start}.p"]
    slippery = config[f"{start}.is_slippery"]
    is_slippery = slippery is None or numbers.flag(slippery, f"{start}.is_slippery")
    return {
        "kind": "frozen_lake",
        "size": config.whole(f"{start}.size", 4),
        "holes": round(1 - (0.8 if ice is None else numbers.real(ice, f"{start}.p")), 6),
        "slip": 2 / 3 if is_slippery else 0.0,
    }


def _mix(
    tags: Sequence[str], sections: Sequence[dict[str, Any]], role: str, config: PeerConfig
) -> dict[str, Any]:
    """Return one environment, or a mixture of several by their shares of the groups."""
    if len(sections) == 1:
        return sections[0]
    key = f"{role}_env_manager.num_groups_partition"
    shares = config[key] or [1] * len(tags)
    if not isinstance(shares, list) or len(shares) != len(tags):
        raise InvalidValue(f"{key} must have a number for each tag. Set it")
    return {
        "kind": "mixture",
        "parts": [
            {**section, "tag": tag, "weight": numbers.real(share, key)}
            for tag, section, share in zip(tags, sections, shares, strict=True)
        ],
    }
