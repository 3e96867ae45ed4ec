import importlib
import sys
from pathlib import Path

import pytest
from environments import stand_in_textworld
from pydantic import ValidationError

from ratchet.config.model_shape.presets import get_preset
from ratchet.config.registry import KINDS
from ratchet.config.resolve import section_class
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.environments.adapters.gem import GemConfig
from ratchet.environments.adapters.reset_step import ResetStepConfig
from ratchet.environments.adapters.textworld import TextWorldConfig
from ratchet.environments.adapters.trl import TRLEnvironmentConfig
from ratchet.environments.adapters.verifiers import VerifiersConfig
from ratchet.environments.code.interpreter import CodeInterpreterConfig
from ratchet.environments.code.repair import CodeRepairConfig
from ratchet.environments.datasets.config import DatasetConfig, PreferencesConfig
from ratchet.environments.datasets.gsm8k import GSM8KConfig
from ratchet.environments.games.game import GameConfig
from ratchet.environments.mixture import MixtureConfig
from ratchet.environments.openenv.environment import OpenEnvConfig
from ratchet.environments.servers.nemo_gym import NemoGymConfig
from ratchet.environments.servers.open_reward import OpenRewardConfig
from ratchet.environments.shop.environment import ShopConfig
from ratchet.environments.tool_use.environment import ToolEnvironmentConfig
from ratchet.environments.tool_use.shell import ShellConfig
from ratchet.environments.toy.arithmetic import ArithmeticConfig
from ratchet.environments.toy.countdown import CountdownConfig
from ratchet.environments.toy.sorting import SortingConfig
from ratchet.environments.workers.environment import WorkersConfig
from ratchet.experience.config import MessageLogConfig
from ratchet.models.load import init_policy
from ratchet.models.scalar_head import ScalarHead, save_head
from ratchet.rewards.answers.countdown import CountdownRewardConfig
from ratchet.rewards.reward_model import RewardModelConfig

MADE_OF_OTHERS = {"mixture", "message_log", "atropos"}  # tested where their parts are
ENVIRONMENTS = [
    section_class("environment", kind)
    for kind in KINDS["environment"]
    if kind not in MADE_OF_OTHERS
]
REWARDS = [section_class("rewards", kind) for kind in KINDS["rewards"]]


def reward_model_in(directory):
    tokenizer = byte_tokenizer()
    init_policy(get_preset("tiny", vocab_size=tokenizer.vocab_size, hidden_size=32), seed=1).save(
        directory
    )
    tokenizer.save(directory)
    save_head(ScalarHead(32), directory)
    return str(directory)


@pytest.mark.parametrize("section", [*ENVIRONMENTS, *REWARDS])
def test_each_kind_names_a_class_that_takes_its_section(section, tmp_path, monkeypatch, require):
    if issubclass(section, VerifiersConfig):
        require("verifiers", "its class loads a taskset")
    monkeypatch.syspath_prepend(Path(__file__).parent)  # words_taskset
    module, name = section.builds.split(":")
    built = getattr(importlib.import_module(module), name)
    needed = {"train": "t.jsonl", "pattern": "x", "domains": {"*": [{"kind": "exact_match"}]}}
    needed |= {
        "problems": {"kind": "programs"},
        "tools": [{"kind": "calculator"}],
        "parts": [{"kind": "sorting"}],
    }
    needed |= {"worker": {"kind": "sorting"}, "texts": ("x",)}
    needed |= {"url": "http://localhost:1/v1", "model": "m", "taskset": "words_taskset"}
    needed |= {
        "interface": "experience.copying_env:Copying",
        "data": "experience.copying_env:samples",
    }
    needed |= {
        "function": "rewards.integrations.trl_rewards:exact",
        "factory": "environments.adapters.trl_environments:Counter",
    }
    monkeypatch.setitem(sys.modules, "textworld", stand_in_textworld)
    needed |= (
        {"path": "collections:OrderedDict"}
        if issubclass(section, GemConfig)
        else {"id": "FrozenLake-v1"}
    )
    if issubclass(section, RewardModelConfig):
        needed["path"] = reward_model_in(tmp_path)
    config = section(
        **{name: value for name, value in needed.items() if name in section.model_fields}
    )
    assert getattr(built(config), "config", config) is config


@pytest.mark.parametrize("section", ENVIRONMENTS)
def test_each_environment_names_a_reward_that_exists_unless_its_answers_come_judged(section):
    judged = (
        PreferencesConfig,
        GameConfig,
        ResetStepConfig,
        TextWorldConfig,
        VerifiersConfig,
        TRLEnvironmentConfig,
        MessageLogConfig,
        ShellConfig,
        OpenEnvConfig,
        NemoGymConfig,
        OpenRewardConfig,
        CodeRepairConfig,
        ShopConfig,
    )
    # as what they are made of, or a preset, says
    judged += (MixtureConfig, ToolEnvironmentConfig, WorkersConfig, DatasetConfig)
    judged += (CodeInterpreterConfig,)
    assert section.default_reward in KINDS["rewards"] or issubclass(section, judged)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (SortingConfig, {"digits": 0}, "greater than or equal to 1"),
        (ArithmeticConfig, {"digits": 0}, "greater than or equal to 1"),
        (ArithmeticConfig, {"operators": ()}, "at least 1 item"),
        (ArithmeticConfig, {"operators": ("+", "+")}, "list each once"),
        (ArithmeticConfig, {"operators": ("/",)}, "Input should be"),
        (ArithmeticConfig, {"digit": 2}, "Extra inputs"),
        (CountdownConfig, {"numbers": 1}, "greater than or equal to 2"),
        (CountdownConfig, {"operators": ("*", "*")}, "list each once"),
        (CountdownConfig, {"template": "reach {target}"}, "template lacks {numbers}"),
        (GSM8KConfig, {}, "train"),
        (GSM8KConfig, {"train": "a", "shots": -1}, "greater than or equal to 0"),
        (GSM8KConfig, {"train": "a", "test": "b", "split_column": "split"}, "remove one"),
        (CountdownRewardConfig, {"partial": 1.0}, "less than 1"),
    ],
)
def test_impossible_values_are_refused(section, values, message):
    with pytest.raises(ValidationError, match=message):
        section(**values)
