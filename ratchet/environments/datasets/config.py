"""The configuration of environments that read datasets. Importing it loads no data library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from ratchet.config.media_limits import FileLimits
from ratchet.config.sections import ALL_SOURCES, EnvironmentConfig
from ratchet.data.files import DataFile, find_files
from ratchet.data.formats.media_columns import MEDIA_COLUMNS
from ratchet.data.presets.datasets import Preset
from ratchet.data.presets.lookup import find_dataset_preset
from ratchet.data.row_filters import KeepConfig
from ratchet.errors import ConfigError
from ratchet.utils.object_store import is_address


class PreferencesConfig(EnvironmentConfig):
    """A dataset of preferences from files, in any common format (docs/preference-data.md).

    The test split is the file `test`, or else a tenth of the prompts of `train`.
    """

    builds: ClassVar[str] = "ratchet.environments.datasets.preferences:Preferences"
    data_kinds: ClassVar[frozenset[str]] = ALL_SOURCES
    returns_rewards: ClassVar[bool] = False
    usual_columns: ClassVar[tuple[str, ...]] = (
        "prompt",
        "chosen",
        "rejected",
        "score_chosen",
        "score_rejected",
        "completion",
        "label",
        "completions",
        "labels",
    )

    train: DataFile
    """A file, or an address in an object store."""
    test: DataFile | None = None
    """File of the test split, or an address in an object store; null: a tenth of the prompts of
    train."""
    columns: dict[str, str] = Field({})
    """The file's column for each usual name, if they differ: {chosen: preferred}."""
    separator: str = "\n"
    """Text appended to each step of an answer with step labels."""

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        for usual_name in columns:
            if usual_name not in cls.usual_columns:
                near = get_close_matches(usual_name, cls.usual_columns, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(
                    f"{usual_name} is not a usual column: {hint}the usual columns are "
                    f"{', '.join(cls.usual_columns)}"
                )
        names = [columns.get(usual_name, usual_name) for usual_name in cls.usual_columns]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            colliding = " and ".join(
                usual_name
                for usual_name in cls.usual_columns
                if columns.get(usual_name, usual_name) == repeated
            )
            raise ValueError(
                f"{colliding} would both be read from '{repeated}': name another column for one"
            )
        return columns


# Usual column names by the kind of row that has them.
PROMPT_COLUMNS = ("prompt", "answer", "solution")
CONVERSATION_COLUMNS = ("messages", "tools")
TEXT_COLUMNS = ("text",)
PREFERENCE_COLUMNS = ("first", "second", "preference")  # two answers, and which is better
COMMON_COLUMNS = ("id", "system", "difficulty", "tag")
USUAL_COLUMNS = tuple(
    dict.fromkeys(
        (
            *COMMON_COLUMNS,
            *PROMPT_COLUMNS,
            *CONVERSATION_COLUMNS,
            *TEXT_COLUMNS,
            *PreferencesConfig.usual_columns,
            *PREFERENCE_COLUMNS,
            *MEDIA_COLUMNS,
        )
    )
)


class DatasetConfig(EnvironmentConfig):
    """A dataset from files, an object store or the Hugging Face Hub (docs/data.md).

    Its rows are prompts with answers, conversations, preference pairs or labelled answers. A preset
    names a published dataset and its columns. Other keys override the preset.

    The test split is `test`, or the test split on the Hub, or else a share of the rows by hash.
    """

    builds: ClassVar[str] = "ratchet.environments.datasets.dataset:dataset"
    has_scan: ClassVar[bool] = True

    preset: str | None = None
    """Name of a published dataset: gsm8k, hh_rlhf, tulu3_sft, ...; null: none."""
    train: tuple[DataFile, ...] = ()
    """Files, patterns, directories or addresses (s3://, gs://, hf://); empty: the Hub."""
    test: tuple[DataFile, ...] = ()
    """Files, patterns, directories or addresses of the test split; empty: see test_split and
    test_share."""
    hub: str | None = None
    """Id of a dataset on the Hub, instead of train; null: the preset's."""
    subset: str | None = None
    """Configuration of the dataset on the Hub; null: the preset's, or the dataset's default."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; null: the default branch."""
    train_split: str | None = None
    """Training split on the Hub; null: the preset's, or train. Empty: none."""
    test_split: str | None = None
    """Test split on the Hub; null: the preset's. Empty: none."""
    columns: dict[str, str] = Field({})
    """The rows' column for each usual name, if they differ: {prompt: problem, answer:
    extra.answer}. Dots reach nested values."""
    prompt: str | None = None
    """Template of the prompt over columns: '{question} Think first.'; null: the preset's, or the
    column prompt."""
    system: str = ""
    """System message before prompts that are text; empty: the column system, or no system
    message."""
    chat_template_columns: dict[str, str] = Field({})
    """Variables of the chat template that a row sets, each with its column: {reasoning_effort:
    effort}. A null sets nothing."""
    answer_after: str | None = None
    """Marker before the answer in its column (####); null: the preset's, or none."""
    media_root: DataFile | None = None
    """Directory or store of the images and clips that rows name; null: the first file's
    directory."""
    media: FileLimits = FileLimits()
    """Limits of images, clips and videos of rows."""
    keep: tuple[KeepConfig, ...] = ()
    """Filters that all rows must pass, in addition to those of the preset."""
    distinct: bool | None = None
    """Keep only the first of rows with equal prompts; null: the preset's, or false."""
    test_share: float = Field(0.1, ge=0, lt=1)
    """Share of the rows held out if there is no test split; 0: none."""
    overlap: Literal["refuse", "drop"] = "refuse"
    """Handling of training rows with a prompt of the test split: refuse raises an error, drop
    leaves them out."""
    too_long: Literal["error", "drop"] = "error"
    """Handling of rows with more tokens than the model's context; in rollouts only the prompt
    counts. error: ends the run, or fails the attempt in rollouts. drop: leaves the row out."""
    shuffle: bool = True
    """Shuffle the rows anew in each pass; false: keep their order."""
    scan: bool = True
    """Read every row once before training, to check and filter it. False: rows are checked when
    they are used."""

    @field_validator(
        "train",
        "test",
        mode="before",
        json_schema_input_type=DataFile | tuple[DataFile, ...] | None,
    )
    @classmethod
    def _make_tuple(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) or not isinstance(value, Iterable) else value

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        for usual_name in columns:
            if usual_name not in USUAL_COLUMNS:
                near = get_close_matches(usual_name, USUAL_COLUMNS, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(
                    f"{usual_name} is not a usual column: {hint}the usual columns are "
                    f"{', '.join(USUAL_COLUMNS)}"
                )
        return columns

    def check_keys(self) -> None:
        try:
            preset = self.dataset_preset
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if not self.train and not self.test and self.hub is None and preset is None:
            raise ValueError("there is nothing to read: set train (files), hub (an id), or preset")
        if not self.scan:
            self._refuse_keys_without_scan(preset)

    def _refuse_keys_without_scan(self, preset: Preset | None) -> None:
        """Raise ValueError for keys that need all rows to be read before training."""
        has_filters = self.keep or (preset and preset.keep)
        if has_filters or self.is_distinct or self.overlap == "drop":
            key = "keep" if has_filters else "distinct" if self.is_distinct else "overlap: drop"
            raise ValueError(
                f"scan: false reads a row only when it is used, and {key} needs all rows: remove "
                "one of them"
            )
        if self.test_share and not self.test and not self.test_split_name:
            raise ValueError("scan: false can't hold out rows by hash: set test, or test_share: 0")

    @property
    def dataset_preset(self) -> Preset | None:
        """The preset that the recipe names; None without a name."""
        return None if self.preset is None else find_dataset_preset(self.preset)

    @property
    def column_names(self) -> Mapping[str, str]:
        """The rows' column for each usual name. The default is the usual name itself.

        With a preset, only usual names that the preset or `columns` has are included.
        """
        preset = self.dataset_preset
        return {
            **({name: name for name in USUAL_COLUMNS} if preset is None else preset.columns),
            **self.columns,
        }

    @property
    def root(self) -> Path | str | None:
        """Return the directory that media paths are relative to and may not leave.

        None for rows of the Hub without `media_root`.
        """
        if self.media_root:
            return self.media_root
        first_file = next(iter((*self.train, *self.test)), None)
        if first_file is None:
            return None
        if is_address(first_file):
            return str(first_file).rpartition("/")[0]
        return Path(first_file) if Path(first_file).is_dir() else Path(first_file).parent

    @property
    def is_distinct(self) -> bool:
        """True if only the first of rows with equal prompts is kept."""
        preset = self.dataset_preset
        return (
            self.distinct if self.distinct is not None else preset is not None and preset.distinct
        )

    def without_scan(self) -> Self:
        return self.model_copy(update={"scan": False})

    def list_data_files(self) -> list[Path]:
        """Return the dataset's local files. A resumed run checks that they have not changed."""
        return [
            file
            for file in find_files((*self.train, *self.test))
            if isinstance(file, Path) and file.is_file()
        ]

    @property
    def hub_id(self) -> str | None:
        """Return `hub`, or the preset's Hub id if no files are named; None for files."""
        if self.hub is not None:
            return self.hub
        return (
            self.dataset_preset.hub
            if self.dataset_preset is not None and not self.train and not self.test
            else None
        )

    @property
    def train_split_name(self) -> str:
        """The name of the training split on the Hub; "" if there is none, or for files."""
        return self._choose_split_name(
            self.train_split, "train" if self.dataset_preset is None else self.dataset_preset.train
        )

    @property
    def test_split_name(self) -> str:
        """The name of the test split on the Hub; "" if there is none, or for files."""
        return self._choose_split_name(
            self.test_split, "" if self.dataset_preset is None else self.dataset_preset.test
        )

    def _choose_split_name(self, configured: str | None, default: str) -> str:
        if self.hub_id is None:
            return ""
        return default if configured is None else configured

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "" if self.dataset_preset is None else self.dataset_preset.reward

    @property
    def data_kinds(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the kinds of training data that the rows offer.

        These are all kinds if there is no preset, or if `columns` is set. A row without the data
        that the algorithm needs then raises an error when it is read.
        """
        return (
            ALL_SOURCES
            if self.dataset_preset is None or self.columns
            else self.dataset_preset.data_kinds | {"rollouts"}
        )

    @property
    def returns_rewards(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False
