"""Read datasets of the Hugging Face Hub with the package `datasets`, which memory-maps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.data.jsonl import DataRow
from ratchet.errors import DataError, MissingDependency


class HubTable:
    """A split of a Hugging Face dataset as a table.

    Args:
        hub: Id of the dataset on the Hub, or a directory with the same files.
        split: Name of the split.
        subset: The dataset's "configuration" on the Hub; None: the default one.
        revision: Branch, tag or commit on the Hub; None: the default branch.

    Raises DataError if the dataset, subset or split does not exist or can't be reached.
    """

    def __init__(
        self, hub: str, split: str, *, subset: str | None = None, revision: str | None = None
    ) -> None:
        try:
            import datasets
            from datasets.exceptions import DatasetsError
        except ImportError as error:
            raise MissingDependency(
                "datasets", extra="data", needed_for=f"reading {hub} from the Hub"
            ) from error
        self.name = f"{hub} ({', '.join(filter(None, (subset, split)))})"
        try:
            self._rows: Any = datasets.load_dataset(hub, subset, split=split, revision=revision)
        except (OSError, ValueError, RuntimeError, DatasetsError) as error:
            raise DataError(f"{self.name}: can't be loaded: {_get_first_line(error)}") from error
        self._rows = _disable_decoding(self._rows)
        if not len(self._rows):
            raise DataError(f"{self.name}: the split holds no rows")

    @property
    def block_sizes(self) -> Sequence[int]:
        return (len(self),)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> DataRow:
        return DataRow(index + 1, self._rows[index], "row")

    def where(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"


def _disable_decoding(rows: Any) -> Any:
    """Return the rows with encoded media, which Ratchet decodes later, within its limits."""
    import datasets

    media_features = (datasets.Image, datasets.Audio, datasets.Video)

    def disable(feature: Any) -> Any:
        if isinstance(feature, media_features):
            return type(feature)(decode=False)
        if isinstance(feature, dict):
            return {name: disable(inner) for name, inner in feature.items()}
        if isinstance(feature, list):
            return [disable(inner) for inner in feature]
        return (
            datasets.List(disable(feature.feature))
            if isinstance(feature, datasets.List)
            else feature
        )

    features = {name: disable(feature) for name, feature in rows.features.items()}
    return rows if features == dict(rows.features) else rows.cast(datasets.Features(features))


def _get_first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
