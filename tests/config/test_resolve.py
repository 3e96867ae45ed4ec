import importlib
import inspect
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ValidationError

import ratchet
from ratchet.config.base import Section
from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, resolve, section_class
from ratchet.config.sections import ALL_SOURCES, EnvironmentConfig
from ratchet.environments.tool_use.base import ToolConfig
from ratchet.errors import ConfigError


class MazeConfig(Section):
    """Of a maze."""

    default_reward: ClassVar[str] = "exact_match"
    width: int = 4


class Playable:
    """The methods that a class needs to stand for an environment."""

    tasks = reset = step = close = None


class Maze(Playable):
    Config = MazeConfig

    def __init__(self, config: MazeConfig) -> None:
        self.config = config


class Annotated(Playable):
    def __init__(self, config: MazeConfig) -> None:
        self.config = config


class Plain(Playable):
    def __init__(self, width: int, height: int = 3, *, name: str = "x") -> None:
        self.width, self.height, self.name = width, height, name


class Variadic:
    def __init__(self, *sizes: int) -> None: ...


class Unreadable:
    def __init__(self, lock: types.FrameType) -> None: ...


class Reserved:
    def __init__(self, weight: float) -> None: ...


class Foreign:
    class Config:
        pass


def brief(trajectory, task, *, limit: int = 10, scale: float = 1.0):
    return scale * (len(trajectory) <= limit)


def trl_reward(prompts, completions, **kwargs):
    return [1.0] * len(completions)


CONSTANT = 3


@pytest.fixture(autouse=True)
def package(monkeypatch):
    module = types.ModuleType("maze_for_test")
    for name in (
        "MazeConfig",
        "Maze",
        "Annotated",
        "Plain",
        "Variadic",
        "Unreadable",
        "Reserved",
        "Foreign",
        "brief",
        "trl_reward",
        "CONSTANT",
    ):
        setattr(module, name, globals()[name])
    monkeypatch.setitem(sys.modules, "maze_for_test", module)
    section_class.cache_clear()


@pytest.mark.parametrize("name", ["Maze", "Annotated"])
def test_a_class_with_a_section_is_built_with_it(name):
    section = resolve("environment", {"kind": f"maze_for_test:{name}", "width": 7})
    assert isinstance(section, MazeConfig)
    assert (section.kind, section.width, section.default_reward) == (
        f"maze_for_test:{name}",
        7,
        "exact_match",
    )
    assert section.data_kinds == ALL_SOURCES  # unknown, so that the start of the stage checks it
    assert not hasattr(MazeConfig, "data_kinds")
    assert build(section).config.width == 7
    assert section == resolve("environment", section.model_dump())


def test_a_class_without_a_section_is_validated_by_its_signature():
    section = resolve("environment", {"kind": "maze_for_test:Plain", "width": 7, "name": "y"})
    made = build(section, "context that only sections with a Config get")
    assert (made.width, made.height, made.name) == (7, 3, "y")
    with pytest.raises(ValidationError, match="width"):
        resolve("environment", {"kind": "maze_for_test:Plain"})
    with pytest.raises(ValidationError, match="depth"):
        resolve("environment", {"kind": "maze_for_test:Plain", "width": 1, "depth": 2})
    with pytest.raises(ValidationError, match="must be a whole number"):
        resolve("environment", {"kind": "maze_for_test:Plain", "width": "1"})


def test_a_plain_function_is_a_reward_with_its_options_bound():
    section = resolve("rewards", {"kind": "maze_for_test:brief", "limit": 2, "weight": 0.5})
    assert section.weight == 0.5
    reward = build(section)
    assert (reward([1, 2], None), reward([1, 2, 3], None)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("slot", "kind", "message"),
    [
        ("environment", "maze_for_test:Variadic", r"takes '\*sizes: int', which can't be a key"),
        (
            "rewards",
            "maze_for_test:trl_reward",
            r'another library: write \{kind: trl, function: "maze_for_test:trl_reward"\}',
        ),
        ("environment", "maze_for_test:Unreadable", "can't be read from YAML"),
        (
            "rewards",
            "maze_for_test:Reserved",
            "parameter 'weight' of 'maze_for_test:Reserved' is a key that every section has",
        ),
        ("environment", "maze_for_test:Foreign", "must derive from ratchet.config.base.Section"),
        ("environment", "maze_for_test:MazeConfig", "a section that names nothing to build"),
        ("environment", "maze_for_test:CONSTANT", "neither a class nor a function"),
        ("environment", "maze_for_test:Maz", "did you mean 'maze_for_test:Maze'"),
        ("environment", "absent_for_test:Maze", "can't be imported"),
        ("algorithm", "grppo", "did you mean 'grpo'"),
    ],
)
@pytest.mark.fault("C12")
def test_an_unusable_kind_says_why(slot, kind, message):
    with pytest.raises(ConfigError, match=message):
        resolve(slot, {"kind": kind})


def test_a_slot_with_a_default_kind_needs_none():
    assert resolve("learner", {"max_bad_steps": 5}).max_bad_steps == 5
    with pytest.raises(ConfigError, match="one of sft, policy_gradient, grpo"):
        resolve("algorithm", {})


@pytest.mark.parametrize(("slot", "kind"), [(slot, kind) for slot in KINDS for kind in KINDS[slot]])
def test_each_built_in_kind_is_there_and_knows_its_name(slot, kind):
    section = section_class(slot, kind)
    assert section.model_fields["kind"].default == kind
    assert ":" in section.builds


ALGORITHMS = (
    "policy_gradient",
    "named_policy_gradients",
    "preference",
    "distillation",
    "reward_model",
    "sft",
)


def modules_below(package: str) -> list[str]:
    """Return the names of a package's modules, of its folders too, relative to `ratchet`."""
    root = Path(ratchet.__file__).parent
    return [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in sorted((root / package).rglob("*.py"))
        if path.name not in ("__init__.py", "math_worker.py")  # the latter needs math-verify
    ]


MODULES = {
    "algorithm": [f"algorithms.config.{name}" for name in ALGORITHMS],
    "advantage": ["algorithms.config.advantages"],
    "policy_loss": ["algorithms.config.policy_losses"],
    "shaping": ["algorithms.config.shaping"],
    "environment": [*modules_below("environments"), "experience.config"],
    "tool": modules_below("environments/tool_use"),
    "rewards": [name for name in modules_below("rewards") if "judge_models" not in name],
    "judge": ["rewards.judge_models.config"],
    "optimizer": ["config.schema", "learners.optim.config"],
    "learner": ["learners.config"],
    "generator": ["generators.config", "generators.workers.config"],
    "tokenizer": ["data.tokenizer_config"],
}
BASES = {"environment": EnvironmentConfig, "tool": ToolConfig}
# bases of kinds, and lone parts
NO_KINDS = {
    "PreferenceConfig",
    "DistillationConfig",
    "Estimator",
    "PolicyLoss",
    "ShapingPart",
    "CorrectionConfig",
    "StaleCorrectionConfig",
}


@pytest.mark.parametrize("slot", MODULES)
def test_the_table_holds_every_section_that_its_package_declares(slot):
    declared = set()
    for name in MODULES[slot]:
        module = importlib.import_module(f"ratchet.{name}")
        declared |= {
            c
            for c in vars(module).values()
            if inspect.isclass(c) and c.__module__ == module.__name__
        }
    base = BASES.get(slot, Section)
    kinds = {c for c in declared if issubclass(c, base) and c.builds and c.__name__ not in NO_KINDS}
    assert {f"{c.__module__}:{c.__qualname__}" for c in kinds} == set(KINDS[slot].values())


def test_a_mixture_is_made_of_the_same_estimators():
    assert set(KINDS["advantage"]) == {*KINDS["estimator"], "mixture"}


def test_an_agents_ignored_fields_are_a_key_of_every_agent_but_not_what_the_answer_is_made_of():
    section = resolve("agent", {"kind": "command", "command": ["play"], "ignore": ["temperature"]})
    assert section.ignore == ("temperature",)
    with pytest.raises(ValidationError, match="messages can't be ignored"):
        resolve("agent", {"kind": "command", "command": ["play"], "ignore": ["messages"]})
