"""The base classes of games of one player: each move is a word or a letter; a game is won or lost.
`sliding_puzzle.py` is a short example.

A task's `meta` holds the whole start of its game, and its `seed` determines all later chance: the
same messages give the same game, so all attempts at a task meet the same luck. The winning turn
has the reward 1, all others 0.
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

from ratchet.data.formats.media import embed
from ratchet.environments.base import EnvironmentConfig
from ratchet.environments.games.rendering import Mark, Rgb, board
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.protocols import Step
from ratchet.types import Message, Part, Task


class GameConfig(EnvironmentConfig):
    """The base section of games. Their steps give the reward: 1 for the winning move, else 0."""

    max_moves: int = Field(
        20,
        ge=1,
        le=10_000,
        description="Messages of the player, those that are no legal move included.",
    )
    style: Literal["words", "compact"] = Field(
        "words",
        description="words: rules, then whole words; compact: bare boards and single letters, for "
        "a model from scratch.",
    )


class BoardConfig(GameConfig):
    """The base section of games whose states can be drawn."""

    observation: Literal["text", "image", "both"] = Field(
        "text",
        description="How the player sees each state: as text, as a picture, or the picture and the "
        "text.",
    )
    cell_px: int = Field(16, ge=6, le=256, description="Pixels a side of a cell in the picture.")

    @property
    def needs_media(self) -> bool:
        return self.observation != "text"


State = TypeVar("State", bound=Hashable)

MAX_STATES = 200_000  # limit on the states that `shortest_way` visits
DIRECTIONS = {"u": "up", "d": "down", "l": "left", "r": "right"}
LETTERS = {word: letter for letter, word in DIRECTIONS.items()}
OFFSETS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}  # (row, column)


class Game(Procedural, Generic[State]):
    """A game for one player.

    A subclass implements the abstract methods and `sample`, which returns a problem with the start
    in its `meta` and the text of `prompt`. `move` and `player` use moves in the form that `read`
    returns: a word, or a number.
    """

    def __init__(self, config: GameConfig) -> None:
        self.max_moves, self.in_words = config.max_moves, config.style == "words"

    @abstractmethod
    def start(self, task: Task) -> State: ...

    @abstractmethod
    def move(self, state: State, move: str, luck: random.Random) -> State | None:
        """Return the next state, or None if the rules forbid the move. `luck` is the turn's random
        generator."""

    @abstractmethod
    def won(self, state: State) -> bool | None:
        """Return True for a win, False for a loss, and None while the game continues."""

    @abstractmethod
    def show(self, state: State) -> str:
        """Return the text that the player sees."""

    @abstractmethod
    def player(self, task: Task) -> Callable[[State], str]:
        """Return the best player of a task. It is called with each state in turn, from the start,
        and returns the next move."""

    @abstractmethod
    def rules(self) -> str: ...

    def observed(self, state: State, before: str = "") -> Message:
        """Return the message about a state, after the text `before`."""
        return Message("user", before + self.show(state))

    def key(self, state: State) -> str:
        """Return a key that states share if the game continues alike from them."""
        return self.show(state)

    def read(self, text: str) -> str:
        """Return the move in a message: its last word or letter."""
        words = re.findall(r"[a-z]+", text.lower())
        last = words[-1] if words else ""
        return DIRECTIONS.get(last, last)

    def write(self, move: str) -> str:
        return move if self.in_words else LETTERS.get(move, move)

    def prompt(self, state: State) -> str:
        return f"{self.rules()}\n\n{self.show(state)}" if self.in_words else self.show(state)

    # --- the protocol

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return a whole game of the best player; in games with luck it may be lost."""
        state, player, messages = self.start(task), self.player(task), list[Message]()
        for turn in itertools.count():
            answer = Message("assistant", self.write(player(state)))
            state, step = self._turn(task, state, turn, answer.text)
            messages.append(answer)
            if step.done:
                return messages
            messages += step.messages
        raise AssertionError("a game ends at its last move")

    async def reset(self, task: Task) -> Sequence[Message]:
        self._playing, self._state, self._turns = task, self.start(task), 0
        return task.messages

    async def step(self, message: Message) -> Step:
        self._state, step = self._turn(self._playing, self._state, self._turns, message.text)
        self._turns += 1
        return step

    def _turn(self, task: Task, state: State, turn: int, text: str) -> tuple[State, Step]:
        """Return the state and the step after a message. Turns count from 0.

        A message without a legal move uses up the turn and changes nothing.
        """
        after = self.move(state, self.read(text), random.Random(f"{self.name}/{task.seed}/{turn}"))
        illegal = after is None
        after = state if after is None else after
        won = self.won(after)
        is_done = won is not None or turn + 1 >= self.max_moves
        step = Step(
            messages=() if is_done else (self.observed(after, self._complaint(illegal)),),
            reward=float(won is True),
            done=is_done,
            state_key=self.key(state),
            metrics={"illegal_moves": float(illegal)},
        )
        return after, step

    def _complaint(self, illegal: bool) -> str:
        if not illegal:
            return ""
        return "That is no legal move.\n" if self.in_words else "!"


class BoardGame(Game[State]):
    """A game whose states can be drawn. How they are shown changes neither their keys nor the split
    of a task."""

    def __init__(self, config: BoardConfig) -> None:
        super().__init__(config)
        self.cell_px = config.cell_px
        self.in_text, self.in_pictures = config.observation != "image", config.observation != "text"

    @abstractmethod
    def cells(self, state: State) -> Sequence[Sequence[tuple[Rgb, Sequence[Mark]]]]:
        """Return rows of cells: each cell's background and the marks on it."""

    @abstractmethod
    def rules(self, in_text: bool = True) -> str:
        """Return the rules. in_text: they name things by their signs in the text, else by their
        look in the picture."""

    def picture(self, state: State) -> Part:
        return embed(board(self.cells(state), self.cell_px))

    def observed(self, state: State, before: str = "") -> Message:
        if not self.in_pictures:
            return super().observed(state, before)
        text = before + (self.show(state) if self.in_text else "")
        return Message("user", (self.picture(state), *((Part("text", text),) if text else ())))

    def messages(self, problem: Problem) -> tuple[Message, ...]:
        if not self.in_pictures:
            return super().messages(problem)
        state = self.start(Task("", (), meta=problem.meta))
        return (self.observed(state, f"{self.rules(self.in_text)}\n\n" if self.in_words else ""),)


def neighbours(game: Game[State], state: State) -> Iterator[tuple[str, State]]:
    """Yield the moves of a game without luck that change the state, and the states after them; none
    if the game is over."""
    if game.won(state) is not None:
        return
    for move in OFFSETS:
        after = game.move(state, move, random.Random(0))
        if after is not None and after != state:
            yield move, after


def shortest_way(
    start: State,
    solved: Callable[[State], bool],
    moves: Callable[[State], Iterable[tuple[str, State]]],
    estimate: Callable[[State], int] = lambda _: 0,
) -> list[str] | None:
    """Return the fewest moves from `start` to a solved state.

    None if there is no way, or none was found within MAX_STATES states. The search is A* (Hart,
    Nilsson and Raphael, 1968).

    Args:
        start: The first state.
        solved: True for a goal state.
        moves: Returns the moves from a state, and the states after them.
        estimate: A lower bound on the remaining moves that falls by at most one a move.
    """
    came_from: dict[State, tuple[State, str] | None] = {}
    order = itertools.count()  # breaks ties: first in, first out
    # (estimated moves in all, order, moves made, state, previous state and move)
    waiting: list[tuple[int, int, int, State, tuple[State, str] | None]] = [
        (estimate(start), 0, 0, start, None)
    ]
    while waiting and len(came_from) < MAX_STATES:
        _, _, made, state, origin = heapq.heappop(waiting)
        if state in came_from:
            continue
        came_from[state] = origin
        if solved(state):
            return _retraced(came_from, state)
        for move, after in moves(state):
            if after not in came_from:
                heapq.heappush(
                    waiting,
                    (made + 1 + estimate(after), next(order), made + 1, after, (state, move)),
                )
    return None


def _retraced(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    moves: list[str] = []
    step = came_from[state]
    while step is not None:
        moves.append(step[1])
        step = came_from[step[0]]
    return moves[::-1]


def recited(moves: Iterable[str]) -> Callable[[object], str]:
    """Return a player that makes these moves, whatever the state."""
    plan = iter(moves)
    return lambda state: next(plan)
