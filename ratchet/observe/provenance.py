"""Record the versions of a run's code and data, and changes of its recipe, in `provenance.json`.

Versions are recorded at each start or resume at which they have changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ratchet.observe.summary import get_installed_versions
from ratchet.observe.write_files import replace_text
from ratchet.utils.safe_read import read_json

log = logging.getLogger("ratchet.train")

PACKAGE = Path(__file__).resolve().parents[1]  # Ratchet's sources


def record_provenance(
    path: Path, *, after_step: int, data: Mapping[str, str], model: str | None = None
) -> None:
    """Append the current versions of code and data to the file, unless they equal its last entry.

    If the file can't be written, a warning is logged instead.

    Args:
        path: The file.
        after_step: The step that the run continues after. If it is 0, earlier entries are dropped,
            except changes of the recipe. If the run went back to `after_step`, recipe changes
            recorded at later steps are re-dated to it: the recipe keeps them, so they now apply
            from this step.
        data: The fingerprint of each data file.
        model: The fingerprint of the weights in `model.path`, recorded if the run starts from them
            (`after_step` is 0).
    """
    earlier_entries = read_provenance(path)
    entries = [entry for entry in earlier_entries if after_step or "changes" in entry]
    for index, entry in enumerate(entries):
        if "changes" in entry and entry["after_step"] > after_step:
            entries[index] = {**entry, "after_step": after_step}
    current: dict[str, Any] = {"code": get_code_version(), "data": dict(data)}
    if model is not None and not after_step:
        current["model"] = model
    latest = next((entry for entry in reversed(entries) if "code" in entry), None)
    if latest is None or any(latest.get(name) != value for name, value in current.items()):
        entries.append({"after_step": after_step, **current})
    if entries == earlier_entries:
        return
    try:
        _write_entries(path, entries)
    except OSError as error:
        log.warning("%s can't be written, so the run's provenance is not recorded: %s", path, error)


def record_changes(path: Path, *, after_step: int, changes: Sequence[Mapping[str, Any]]) -> None:
    """Append changes of the recipe, with the time.

    Args:
        path: The file.
        after_step: The step after which they hold.
        changes: The changed keys. Each has `key` (the dotted key), `path` (the same key as a list),
            and the values `from` and `to`.

    Raises:
        OSError: The file can't be written.
    """
    time = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"after_step": after_step, "time": time, "changes": list(changes)}
    _write_entries(path, [*read_provenance(path), entry])


def read_changes(path: Path) -> list[dict[str, Any]]:
    """Return the entries of changed recipes, oldest first."""
    return [entry for entry in read_provenance(path) if "changes" in entry]


def read_first_data(path: Path) -> dict[str, str]:
    """Return the fingerprints of the data that the run began with; {} if none are recorded."""
    return next(
        (
            entry["data"]
            for entry in read_provenance(path)
            if "data" in entry and entry["after_step"] == 0
        ),
        {},
    )


def read_start_model(path: Path) -> str | None:
    """Return the fingerprint of the weights that the run started from; None if none is recorded."""
    return next((entry["model"] for entry in read_provenance(path) if "model" in entry), None)


def _write_entries(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    replace_text(path, json.dumps(list(entries), indent=2) + "\n")


def get_code_version() -> dict[str, str | None]:
    """Return the versions of packages that results depend on, and of Ratchet itself.

    `sources` is the SHA-256 of Ratchet's files; `commit` is the last git commit that changed them,
    or None.
    """
    digest = hashlib.sha256()
    for source in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{source.relative_to(PACKAGE).as_posix()}\n".encode())
        digest.update(source.read_bytes())
    return {**get_installed_versions(), "sources": digest.hexdigest(), "commit": _find_commit()}


def _find_commit() -> str | None:
    """Return the last commit that changed the package, or None.

    It is None without git, and if the package lies in another project's git tree, for example in a
    virtual environment.
    """
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "log", "-1", "--format=%H", "--", "."]
    return (
        subprocess.run(
            command, cwd=PACKAGE, capture_output=True, text=True, check=False
        ).stdout.strip()
        or None
    )


def read_provenance(path: Path) -> list[dict[str, Any]]:
    """Return all entries, oldest first; [] if the file is absent or damaged."""
    # A file of an earlier Ratchet, or one edited by hand, must not prevent the new entry.
    try:
        entries = read_json(path)
    except (OSError, ValueError):
        return []
    return entries if isinstance(entries, list) and all(map(_is_entry, entries)) else []


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("after_step"), int)
        and isinstance(entry.get("data", {}), dict)
        and isinstance(entry.get("changes", []), list)
        and all(isinstance(change, dict) for change in entry.get("changes", []))
    )
