"""The base classes of single-player games, in which each move is a word or a letter.

`sliding_puzzle.py` is a short example. A task's `meta` holds the initial state of its game, and its
`seed` determines all random events. So the same messages give the same game in all attempts at a
task. The winning turn has the reward 1, all others 0.
"""

from __future__ import annotations

import heapq
import itertools
import random
import re
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, Literal, TypeVar

from pydantic import Field

from ratchet.config.sections import EnvironmentConfig
from ratchet.data.formats.media import embed
from ratchet.environments.games.rendering import Mark, Rgb, draw_board
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.protocols import Step
from ratchet.types import Message, Part, Task


class GameConfig(EnvironmentConfig):
    """The base section of games. Their steps give the reward: 1 for the winning move, else 0."""

    max_moves: int = Field(20, ge=1, le=10_000)
    """Maximum number of messages of the player, including illegal moves."""
    style: Literal["words", "compact"] = "words"
    """words: rules and whole words; compact: boards without rules and single letters, for a model
    that is trained from random weights."""


class BoardConfig(GameConfig):
    """The base section of games whose states can be drawn."""

    observation: Literal["text", "image", "both"] = "text"
    """Form in which the player sees each state: text, an image, or both."""
    cell_px: int = Field(16, ge=6, le=256)
    """Side of a cell in the image, in pixels."""

    @property
    def needs_media(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.observation != "text"


State = TypeVar("State", bound=Hashable)

MAX_STATES = 200_000  # limit on the states that `find_shortest_path` visits
DIRECTIONS = {"u": "up", "d": "down", "l": "left", "r": "right"}
LETTER_BY_WORD = {word: letter for letter, word in DIRECTIONS.items()}
OFFSETS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}  # (row, column)


class Game(Procedural, Generic[State]):
    """A game for one player.

    A subclass implements the abstract methods and `sample`, which returns a problem with the
    initial state in its `meta` and the text of `prompt`. `move` and `player` use moves in the form
    that `read_move` returns: a word, or a number.
    """

    def __init__(self, config: GameConfig) -> None:
        self.max_moves, self.uses_word_style = config.max_moves, config.style == "words"

    @abstractmethod
    def start(self, task: Task) -> State:
        """Return the initial state of a task's game."""

    @abstractmethod
    def move(self, state: State, move: str, rng: random.Random) -> State | None:
        """Return the next state, or None for an illegal move.

        Args:
            rng: The turn's random generator.
        """

    @abstractmethod
    def has_won(self, state: State) -> bool | None:
        """Return True for a win, False for a loss, and None while the game continues."""

    @abstractmethod
    def show(self, state: State) -> str:
        """Return the text that the player sees."""

    @abstractmethod
    def player(self, task: Task) -> Callable[[State], str]:
        """Return the best player of a task: a function that takes a state and returns a move.

        The function is called once in each turn, with the game's states in order.
        """

    @abstractmethod
    def rules(self) -> str:
        """Return the rules as text for the player."""

    def observation(self, state: State, prefix: str = "") -> Message:
        """Return the message that shows a state, after the text `prefix`."""
        return Message("user", prefix + self.show(state))

    def key(self, state: State) -> str:
        """Return a key that is equal for states from which the game continues in the same way."""
        return self.show(state)

    def read_move(self, text: str) -> str:
        """Return the move in a message: its last word or letter."""
        words = re.findall(r"[a-z]+", text.lower())
        last = words[-1] if words else ""
        return DIRECTIONS.get(last, last)

    def write_move(self, move: str) -> str:
        """Return a move as the player writes it."""
        return move if self.uses_word_style else LETTER_BY_WORD.get(move, move)

    def prompt(self, state: State) -> str:
        """Return the first message of a game: the rules, if they are shown, and the state."""
        return f"{self.rules()}\n\n{self.show(state)}" if self.uses_word_style else self.show(state)

    # --- the protocol

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return the moves of the best player. They may lose if the game has random events."""
        state = self.start(task)
        player = self.player(task)
        messages = list[Message]()
        for turn in itertools.count():
            answer = Message("assistant", self.write_move(player(state)))
            state, step = self._play_turn(task, state, turn, answer.text)
            messages.append(answer)
            if step.done:
                return messages
            messages += step.messages
        raise AssertionError("a game ends at its last move")

    async def reset(self, task: Task) -> Sequence[Message]:
        self._state = self.start(task)
        self._current_task = task
        self._turns = 0
        return task.messages

    async def step(self, message: Message) -> Step:
        self._state, step = self._play_turn(
            self._current_task, self._state, self._turns, message.text
        )
        self._turns += 1
        return step

    def _play_turn(self, task: Task, state: State, turn: int, text: str) -> tuple[State, Step]:
        """Return the state and the step after a message. Turns count from 0.

        A message without a legal move uses up the turn and changes nothing.
        """
        rng = random.Random(f"{self.name}/{task.seed}/{turn}")
        new_state = self.move(state, self.read_move(text), rng)
        is_illegal = new_state is None
        next_state = state if new_state is None else new_state
        has_won = self.has_won(next_state)
        is_done = has_won is not None or turn + 1 >= self.max_moves
        step = Step(
            messages=()
            if is_done
            else (self.observation(next_state, self._describe_illegal_move(is_illegal)),),
            reward=float(has_won is True),
            done=is_done,
            state_key=self.key(state),
            metrics={"illegal_moves": float(is_illegal)},
        )
        return next_state, step

    def _describe_illegal_move(self, is_illegal: bool) -> str:
        if not is_illegal:
            return ""
        return "That is no legal move.\n" if self.uses_word_style else "!"


class BoardGame(Game[State]):
    """A game whose states can be drawn.

    The form of observations changes neither the states' keys nor the split of a task.
    """

    def __init__(self, config: BoardConfig) -> None:
        super().__init__(config)
        self.cell_px = config.cell_px
        self.shows_text = config.observation != "image"
        self.shows_picture = config.observation != "text"

    @abstractmethod
    def cells(self, state: State) -> Sequence[Sequence[tuple[Rgb, Sequence[Mark]]]]:
        """Return rows of cells: each cell's background and the marks on it."""

    @abstractmethod
    def rules(self, board_is_text: bool = True) -> str:
        """Return the rules.

        Args:
            board_is_text: True to name things by their signs in the text, False to describe their
                look in the picture.
        """

    def picture(self, state: State) -> Part:
        return embed(draw_board(self.cells(state), self.cell_px))

    def observation(self, state: State, prefix: str = "") -> Message:
        if not self.shows_picture:
            return super().observation(state, prefix)
        text = prefix + (self.show(state) if self.shows_text else "")
        return Message("user", (self.picture(state), *((Part("text", text),) if text else ())))

    def messages(self, problem: Problem) -> tuple[Message, ...]:
        if not self.shows_picture:
            return super().messages(problem)
        state = self.start(Task("", (), meta=problem.meta))
        return (
            self.observation(
                state, f"{self.rules(self.shows_text)}\n\n" if self.uses_word_style else ""
            ),
        )


def iter_legal_moves(game: Game[State], state: State) -> Iterator[tuple[str, State]]:
    """Yield the moves that change the state, with the states after them; none after the game's end.

    The game must have no random events.
    """
    if game.has_won(state) is not None:
        return
    for move in OFFSETS:
        next_state = game.move(state, move, random.Random(0))
        if next_state is not None and next_state != state:
            yield move, next_state


def find_shortest_path(
    start: State,
    is_solved: Callable[[State], bool],
    moves: Callable[[State], Iterable[tuple[str, State]]],
    estimate: Callable[[State], int] = lambda _: 0,
) -> list[str] | None:
    """Return the fewest moves from `start` to a solved state, by A* search.

    Return None if there is no path, or none was found within MAX_STATES states. Source: Hart,
    Nilsson and Raphael (1968).

    Args:
        start: The first state.
        is_solved: True for a goal state.
        moves: Returns the moves from a state, and the states after them.
        estimate: A lower bound on the remaining moves that falls by at most one a move.
    """
    came_from: dict[State, tuple[State, str] | None] = {}
    insertion_order = itertools.count()  # of equal estimates, the first added is visited first
    # (estimated moves in total, insertion order, number of moves, state, previous state and move)
    queue: list[tuple[int, int, int, State, tuple[State, str] | None]] = [
        (estimate(start), 0, 0, start, None)
    ]
    while queue and len(came_from) < MAX_STATES:
        _, _, n_moves, state, origin = heapq.heappop(queue)
        if state in came_from:
            continue
        came_from[state] = origin
        if is_solved(state):
            return _retrace(came_from, state)
        for move, next_state in moves(state):
            if next_state not in came_from:
                heapq.heappush(
                    queue,
                    (
                        n_moves + 1 + estimate(next_state),
                        next(insertion_order),
                        n_moves + 1,
                        next_state,
                        (state, move),
                    ),
                )
    return None


def _retrace(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    """Return the moves that led from the first state to `state`."""
    moves: list[str] = []
    step = came_from[state]
    while step is not None:
        moves.append(step[1])
        step = came_from[step[0]]
    return moves[::-1]


def replay_moves(moves: Iterable[str]) -> Callable[[object], str]:
    """Return a player that makes these moves in order."""
    remaining = iter(moves)
    return lambda state: next(remaining)
