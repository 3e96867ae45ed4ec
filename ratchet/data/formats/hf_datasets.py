"""Tables of Hugging Face hub datasets: the package `datasets` downloads once and memory-maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.data.jsonl import DataRow
from ratchet.errors import DataError, MissingDependency


class HubTable:
    """A split of a Hugging Face dataset as a table.

    Args:
        hub: Id of the dataset, or a directory of the same form.
        subset: The hub's "configuration".

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
                "datasets", extra="data", needed_for=f"reading {hub} from the hub"
            ) from error
        self.name = f"{hub} ({', '.join(filter(None, (subset, split)))})"
        try:
            self._rows: Any = datasets.load_dataset(hub, subset, split=split, revision=revision)
        except (OSError, ValueError, RuntimeError, DatasetsError) as error:
            raise DataError(f"{self.name}: can't be had: {_first_line(error)}") from error
        self._rows = _disable_decoding(self._rows)
        if not len(self._rows):
            raise DataError(f"{self.name}: the split holds no rows")

    @property
    def blocks(self) -> Sequence[int]:
        return (len(self),)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> DataRow:
        return DataRow(index + 1, self._rows[index], "row")

    def where(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"


def _disable_decoding(rows: Any) -> Any:
    """Return the rows with media as encoded files, to be decoded on use, within limits."""
    import datasets

    media_features = (datasets.Image, datasets.Audio, datasets.Video)

    def without_decoding(feature: Any) -> Any:
        if isinstance(feature, media_features):
            return type(feature)(decode=False)
        if isinstance(feature, dict):
            return {name: without_decoding(inner) for name, inner in feature.items()}
        if isinstance(feature, list):
            return [without_decoding(inner) for inner in feature]
        return (
            datasets.List(without_decoding(feature.feature))
            if isinstance(feature, datasets.List)
            else feature
        )

    features = {name: without_decoding(feature) for name, feature in rows.features.items()}
    return rows if features == dict(rows.features) else rows.cast(datasets.Features(features))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
