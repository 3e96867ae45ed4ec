"""Leave out rows with more tokens than the model's context, if the environment allows it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ratchet.errors import DataError, RowTooLong
from ratchet.protocols import Environment
from ratchet.types import Task

log = logging.getLogger(__name__)

MAX_DROPPED = 10_000  # rows dropped one after another; then the data are refused


class LongRowFilter:
    """A filter of tasks that counts what it leaves out.

    Args:
        environment: The environment of the tasks.
        check: Raises RowTooLong for a task whose row is too long.
    """

    def __init__(self, environment: Environment, check: Callable[[Task], None]) -> None:
        self._environment = environment
        self.check = check
        self._dropped: set[str] = set()  # ids of tasks
        self._n_consecutive = 0

    def keeps(self, task: Task) -> bool:
        """True unless the task is too long and the environment allows to leave it out.

        The number of tasks left out is logged at 1, 2, 4, 8, ...

        Raises:
            DataError: The last MAX_DROPPED tasks were all too long.
        """
        if not self._environment.drops_too_long_rows(task):
            return True
        try:
            self.check(task)
        except RowTooLong as error:
            self._note(task, error)
            return False
        self._n_consecutive = 0
        return True

    def _note(self, task: Task, error: RowTooLong) -> None:
        """Count a task that is left out, and log the count at 1, 2, 4, 8, ..."""
        self._n_consecutive += 1
        if self._n_consecutive >= MAX_DROPPED:
            raise DataError(f"the last {MAX_DROPPED:,} rows are too long; {error}") from error
        if task.id in self._dropped:
            return
        self._dropped.add(task.id)
        count = len(self._dropped)
        if count & (count - 1) == 0:  # 1, 2, 4, 8, ...
            plural = "" if count == 1 else "s"
            log.warning("too_long=drop: %d row%s left out so far; %s", count, plural, error)
