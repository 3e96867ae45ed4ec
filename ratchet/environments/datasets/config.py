"""Configuration of the environments that read datasets; it imports neither them nor torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ratchet.config.media_limits import FileLimits
from ratchet.data.files import DataFile, expand
from ratchet.data.formats.media_columns import COLUMNS as OF_MEDIA
from ratchet.data.presets.datasets import Preset
from ratchet.data.presets.lookup import find_dataset_preset
from ratchet.data.row_filters import KeepConfig
from ratchet.environments.base import ALL_SOURCES, EnvironmentConfig
from ratchet.errors import ConfigError
from ratchet.utils.object_store import is_address


class PreferencesConfig(EnvironmentConfig):
    """A dataset of preferences from files, in any common format (docs/preference-data.md).

    The test split is the file `test`; without one, it is a tenth of the prompts of `train`.
    """

    builds: ClassVar[str] = "ratchet.environments.datasets.preferences:Preferences"
    gives: ClassVar[frozenset[str]] = ALL_SOURCES
    judges: ClassVar[bool] = False
    usual_columns: ClassVar[tuple[str, ...]] = (
        *("prompt", "chosen", "rejected", "score_chosen", "score_rejected"),
        *("completion", "label", "completions", "labels"),
    )

    train: DataFile = Field(description="A file, or an address in an object store.")
    test: DataFile | None = Field(
        None, description="File of the test split, or an address in an object store."
    )
    columns: dict[str, str] = Field(
        {},
        description="Names of columns in the files, where not the usual ones: {chosen: preferred}.",
    )
    separator: str = Field("\n", description="Appended to each step of an answer in steps.")

    @field_validator("columns")
    @classmethod
    def _usual_columns_by_distinct_names(cls, columns: dict[str, str]) -> dict[str, str]:
        for usual in columns:
            if usual not in cls.usual_columns:
                near = get_close_matches(usual, cls.usual_columns, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(
                    f"{usual} is no column: {hint}there are {', '.join(cls.usual_columns)}"
                )
        names = [columns.get(usual, usual) for usual in cls.usual_columns]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            colliding = " and ".join(
                usual for usual in cls.usual_columns if columns.get(usual, usual) == repeated
            )
            raise ValueError(
                f"{colliding} would both be read from '{repeated}': give each a column of its own"
            )
        return columns


OF_PROMPTS = ("prompt", "answer", "solution")
OF_CONVERSATIONS = ("messages", "tools")
OF_EITHER_RESPONSE = ("first", "second", "preference")
OF_ANY = ("id", "system", "difficulty")
USUAL_COLUMNS = tuple(
    dict.fromkeys(
        (
            *OF_ANY,
            *OF_PROMPTS,
            *OF_CONVERSATIONS,
            *PreferencesConfig.usual_columns,
            *OF_EITHER_RESPONSE,
            *OF_MEDIA,
        )
    )
)


class DatasetConfig(EnvironmentConfig):
    """A dataset from files, an object store or the Hugging Face hub (docs/data.md).

    Its rows are prompts with answers, conversations, pairs or labelled answers. A preset says where
    a published dataset is and what its columns mean; any key set beside it overrides the preset.

    The test split is `test`, or the hub's; without either, a hash selects a share of the rows.
    """

    builds: ClassVar[str] = "ratchet.environments.datasets.dataset:dataset"
    needs_media: ClassVar[bool] = False

    preset: str | None = Field(
        None, description="A published dataset by its name: gsm8k, hh_rlhf, tulu3_sft, ..."
    )
    train: tuple[DataFile, ...] = Field(
        (), description="Files, patterns, directories or addresses (s3://, gs://, hf://)."
    )
    test: tuple[DataFile, ...] = Field(
        (), description="Files, patterns, directories or addresses of the test split."
    )
    hub: str | None = Field(
        None, description="A dataset of the hub, where train is not given; null: the preset's."
    )
    subset: str | None = Field(
        None,
        description="Configuration of the dataset on the hub; null: the preset's, or the "
        "dataset's own.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    train_split: str | None = Field(
        None, description="Training split on the hub; null: the preset's, or train. Empty: none."
    )
    test_split: str | None = Field(
        None, description="Test split on the hub; null: the preset's. Empty: none."
    )
    columns: dict[str, str] = Field(
        {},
        description="Names of columns in the rows: {prompt: problem, answer: extra.answer}; dots "
        "lead into values.",
    )
    prompt: str | None = Field(
        None,
        description="The prompt, made of columns: '{question} Think first.'; null: the preset's.",
    )
    system: str = Field(
        "",
        description="A system message before prompts that are text; empty: none, or the column "
        "system.",
    )
    answer_after: str | None = Field(
        None, description="Marker before the answer in its column (####); null: the preset's."
    )
    media_root: DataFile | None = Field(
        None,
        description="Directory, or store, of images and clips that rows name; null: where the "
        "first file lies.",
    )
    media: FileLimits = Field(
        FileLimits(), description="Limits of images, clips and videos of rows."
    )
    keep: tuple[KeepConfig, ...] = Field(
        (), description="Filters of the rows: all of these hold for a row, and the preset's."
    )
    distinct: bool | None = Field(
        None, description="Keep the first of rows with equal prompts; null: the preset's, or false."
    )
    test_share: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of the rows held out, where no test split is named; 0: none.",
    )
    overlap: Literal["refuse", "drop"] = Field(
        "refuse",
        description="Prompts of the test split among those for training are an error, or are left "
        "out there.",
    )
    shuffle: bool = Field(
        True, description="Each pass over the rows has an order of its own; false: as they lie."
    )
    scan: bool = Field(
        True,
        description="Read every row once before training, to check and to select. False: rows are "
        "checked when met.",
    )

    @field_validator("train", "test", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) or not hasattr(value, "__iter__") else value

    @field_validator("columns")
    @classmethod
    def _usual_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        for usual in columns:
            if usual not in USUAL_COLUMNS:
                near = get_close_matches(usual, USUAL_COLUMNS, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(
                    f"{usual} is no column: {hint}there are {', '.join(USUAL_COLUMNS)}"
                )
        return columns

    @model_validator(mode="after")
    def _can_be_read(self) -> DatasetConfig:
        try:
            published = self.published
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if not self.train and not self.test and self.hub is None and published is None:
            raise ValueError("there is nothing to read: set train (files), hub (an id), or preset")
        if not self.scan:
            self._refuse_keys_that_scan(published)
        return self

    def _refuse_keys_that_scan(self, published: Preset | None) -> None:
        has_filters = self.keep or (published and published.keep)
        if has_filters or self.is_distinct or self.overlap == "drop":
            key = "keep" if has_filters else "distinct" if self.is_distinct else "overlap: drop"
            raise ValueError(
                f"scan: false reads no row before it is met, and {key} selects rows: remove one "
                "of them"
            )
        if self.test_share and not self.test and not self.test_name:
            raise ValueError(
                "scan: false can't hold rows out by their hash: name test, or set test_share: 0"
            )

    @property
    def published(self) -> Preset | None:
        return None if self.preset is None else find_dataset_preset(self.preset)

    @property
    def names(self) -> Mapping[str, str]:
        """The name in the rows of each usual column; by default the usual name itself.

        With a preset, it has only the columns that the preset or `columns` names.
        """
        published = self.published
        return {
            **({name: name for name in USUAL_COLUMNS} if published is None else published.columns),
            **self.columns,
        }

    @property
    def root(self) -> Path | str | None:
        """Return the directory that media paths are relative to and may not leave.

        None for rows of the hub without `media_root`.
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
        published = self.published
        return (
            self.distinct
            if self.distinct is not None
            else published is not None and published.distinct
        )

    @property
    def data_files(self) -> Sequence[Path]:
        """Return the dataset's local files, so that a resumed run can check that they have not
        changed.
        """
        return [
            file
            for file in expand((*self.train, *self.test))
            if isinstance(file, Path) and file.is_file()
        ]

    @property
    def hub_id(self) -> str | None:
        """Return `hub`, or the preset's hub id if no files are named; None if neither applies."""
        if self.hub is not None:
            return self.hub
        return (
            self.published.hub
            if self.published is not None and not self.train and not self.test
            else None
        )

    @property
    def train_name(self) -> str:
        """The hub's name of the training split; "" if there is none, or rows come from files."""
        return self._split(
            self.train_split, "train" if self.published is None else self.published.train
        )

    @property
    def test_name(self) -> str:
        return self._split(self.test_split, "" if self.published is None else self.published.test)

    def _split(self, configured: str | None, default: str) -> str:
        if self.hub_id is None:
            return ""
        return default if configured is None else configured

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "" if self.published is None else self.published.reward

    @property
    def gives(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the kinds of training data that the rows offer.

        Without a preset, or with `columns`, this is all kinds: a row that lacks what the algorithm
        needs raises when it is read.
        """
        return (
            ALL_SOURCES
            if self.published is None or self.columns
            else self.published.gives | {"rollouts"}
        )

    @property
    def judges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False
