"""Leave out rows with more tokens than the model's context, where the data ask for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from ratchet.errors import DataError, RowTooLong
from ratchet.protocols import Environment
from ratchet.types import Task

log = logging.getLogger(__name__)

# After this many such rows in a row there is taken to be no other.
MAX_DROPPED = 10_000


@runtime_checkable
class DropsLongRows(Protocol):
    """An environment whose rows may be left out if they are too long."""

    def drops_too_long(self, task: Task) -> bool:
        """Return True to leave the task out if its row is too long; False makes it an error."""
        ...


class LongRowFilter:
    """A filter of tasks that counts what it leaves out.

    Args:
        environment: The environment of the tasks.
        check: Raises RowTooLong for a task whose row is too long.
    """

    def __init__(self, environment: Environment, check: Callable[[Task], None]) -> None:
        self.environment = environment
        self.check = check
        self._dropped: set[str] = set()  # ids of tasks
        self._in_a_row = 0

    def keeps(self, task: Task) -> bool:
        """Return False for a task to leave out. The log gets their number as it grows.

        Raises:
            DataError: Every one of many tasks is too long.
        """
        environment = self.environment
        if not isinstance(environment, DropsLongRows) or not environment.drops_too_long(task):
            return True
        try:
            self.check(task)
        except RowTooLong as error:
            self._note(task, error)
            return False
        self._in_a_row = 0
        return True

    def _note(self, task: Task, error: RowTooLong) -> None:
        self._in_a_row += 1
        if self._in_a_row >= MAX_DROPPED:
            raise DataError(f"the last {MAX_DROPPED:,} rows are too long; {error}") from error
        if task.id in self._dropped:
            return
        self._dropped.add(task.id)
        count = len(self._dropped)
        if count & (count - 1) == 0:  # 1, 2, 4, 8, ...
            plural = "" if count == 1 else "s"
            log.warning("too_long=drop: %d row%s left out so far; %s", count, plural, error)
