"""Run `ratchet data swe-tasks`: write rows of SWE-bench's form as Harbor's task directories."""

from __future__ import annotations

from pathlib import Path

from ratchet.data.tables import read_rows
from ratchet.environments.harbor.swe_rows import SweRow, write_swe_task
from ratchet.errors import ConfigError


def write_swe_tasks(
    rows: str, folder: Path, *, repositories: Path, command: str, timeout_s: float
) -> int:
    """Write a task directory for each row, and return their number.

    Args:
        rows: A data file, or its address.
        folder: Directory of the task directories; it must not exist yet, or be empty.
        repositories: Directory of the repositories' clones.
        command: The shell command that starts pytest.
        timeout_s: Time limit of a task's tests in seconds.

    Raises:
        ConfigError: `folder` has files.
        DataError: A row is malformed, or its repository is missing.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} has files already: choose an empty directory")
    count = 0
    for row in read_rows(rows):
        swe_row = SweRow.from_values(row.values, row.where)
        task = folder / swe_row.name
        if task.exists():
            raise ConfigError(f"{row.where}: instance_id={swe_row.name} names two rows")
        write_swe_task(swe_row, repositories, task, command=command, timeout_s=timeout_s)
        count += 1
    return count
