"""Ratchet post-trains language models by reinforcement learning, on a laptop or on a cluster.

`import ratchet` is light: a public name loads its module on first use, and torch with it only where
it is needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratchet.algorithms.config.named_policy_gradients import GRPOConfig as GRPOConfig
    from ratchet.algorithms.config.sft import SFTConfig as SFTConfig
    from ratchet.config.loader import load_config as load_config
    from ratchet.config.model_shape.presets import get_preset as get_preset
    from ratchet.config.resolve import build as build
    from ratchet.config.schema import EvaluationConfig as EvaluationConfig
    from ratchet.config.schema import OptimizerConfig as OptimizerConfig
    from ratchet.data.chat.builtin_tokenizers import character_tokenizer as character_tokenizer
    from ratchet.data.chat.tokenizer_loading import load_tokenizer as load_tokenizer
    from ratchet.environments.datasets.config import PreferencesConfig as PreferencesConfig
    from ratchet.environments.datasets.gsm8k import GSM8K as GSM8K
    from ratchet.environments.datasets.gsm8k import GSM8KConfig as GSM8KConfig
    from ratchet.environments.datasets.preferences import Preferences as Preferences
    from ratchet.environments.toy.arithmetic import Arithmetic as Arithmetic
    from ratchet.environments.toy.arithmetic import ArithmeticConfig as ArithmeticConfig
    from ratchet.environments.toy.countdown import Countdown as Countdown
    from ratchet.environments.toy.countdown import CountdownConfig as CountdownConfig
    from ratchet.environments.toy.sorting import Sorting as Sorting
    from ratchet.environments.toy.sorting import SortingConfig as SortingConfig
    from ratchet.learners.optim.config import MuonConfig as MuonConfig
    from ratchet.models.load import init_policy as init_policy
    from ratchet.models.load import load_policy as load_policy
    from ratchet.rewards.base import as_reward as as_reward
    from ratchet.training.build import make_run as make_run
    from ratchet.training.loop import train as train
    from ratchet.training.stage import EnvSetup as EnvSetup
    from ratchet.training.stage import Policy as Policy
    from ratchet.training.stage import StageSpec as StageSpec
    from ratchet.types import Group as Group
    from ratchet.types import Message as Message
    from ratchet.types import Sampling as Sampling
    from ratchet.types import Task as Task
    from ratchet.types import Trajectory as Trajectory

    __version__: str

_NAMES_BY_MODULE = {
    "ratchet.algorithms.config.named_policy_gradients": ("GRPOConfig",),
    "ratchet.algorithms.config.sft": ("SFTConfig",),
    "ratchet.training.build": ("make_run",),
    "ratchet.config.resolve": ("build",),
    "ratchet.config.loader": ("load_config",),
    "ratchet.config.schema": ("EvaluationConfig", "OptimizerConfig"),
    "ratchet.data.chat.builtin_tokenizers": ("character_tokenizer",),
    "ratchet.data.chat.tokenizer_loading": ("load_tokenizer",),
    "ratchet.environments.toy.arithmetic": ("Arithmetic", "ArithmeticConfig"),
    "ratchet.environments.datasets.config": ("PreferencesConfig",),
    "ratchet.environments.datasets.gsm8k": ("GSM8K", "GSM8KConfig"),
    "ratchet.environments.toy.countdown": ("Countdown", "CountdownConfig"),
    "ratchet.environments.datasets.preferences": ("Preferences",),
    "ratchet.environments.toy.sorting": ("Sorting", "SortingConfig"),
    "ratchet.learners.optim.config": ("MuonConfig",),
    "ratchet.training.loop": ("train",),
    "ratchet.models.load": ("init_policy", "load_policy"),
    "ratchet.config.model_shape.presets": ("get_preset",),
    "ratchet.rewards.base": ("as_reward",),
    "ratchet.training.stage": ("EnvSetup", "Policy", "StageSpec"),
    "ratchet.types": ("Group", "Message", "Sampling", "Task", "Trajectory"),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
__all__ = ["__version__", *_MODULE_BY_NAME]  # pyright: ignore[reportUnsupportedDunderAll]


def _read_version() -> str:
    """Return the version of the installed distribution; "unknown" for sources alone."""
    from importlib.metadata import PackageNotFoundError, version

    from ratchet.errors import DISTRIBUTION

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _read_version()
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'ratchet' has no attribute '{name}'")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
