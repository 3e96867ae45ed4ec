"""Play the demonstrations of an environment: a task whose solution earns too little is broken."""

from __future__ import annotations

from dataclasses import dataclass

from ratchet.errors import DataError
from ratchet.evals.message_player import AttemptFailed, AttemptState, MessagePlayer, Reply
from ratchet.types import Sampling

ORACLE = "oracle"  # the target of `ratchet eval`


@dataclass(frozen=True)
class OraclePlayer(MessagePlayer):
    """A player that gives the assistant messages of the task's demonstration."""

    max_turns: int = 64
    timeout_s: float | None = None

    async def answer(
        self,
        state: AttemptState,
        sampling: Sampling,
        turn_index: int,
        stop_strings: tuple[str, ...],
    ) -> Reply | None:
        """Return the demonstration's next turn; None after its last one.

        Raises AttemptFailed if the task has no demonstration.
        """
        try:
            messages = state.environment.demonstration(state.task)
        except DataError as error:
            raise AttemptFailed("demonstration", str(error)) from error
        turns = [message for message in messages if message.role == "assistant"]
        return Reply(turns[turn_index]) if turn_index < len(turns) else None
