"""The frozen lake: the player walks over ice (.) to the goal (G) without falling into a hole (O).

On slippery ice a step may go to either side instead of ahead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import ClassVar

from pydantic import Field

from ratchet.environments.games.game import (
    OFFSETS,
    BoardConfig,
    BoardGame,
    find_shortest_path,
    iter_legal_moves,
)
from ratchet.environments.games.rendering import COLOURS, Mark, Rgb
from ratchet.environments.single_turn import Problem
from ratchet.types import Task


class FrozenLakeConfig(BoardConfig):
    """Walk over the ice to the goal, around the holes."""

    builds: ClassVar[str] = "ratchet.environments.games.frozen_lake:FrozenLake"

    size: int = Field(4, ge=2, le=20)
    """Number of cells on a side."""
    holes: float = Field(0.25, ge=0, lt=1)
    """Probability that a cell is a hole. There is always a path to the goal."""
    slip: float = Field(0.0, ge=0, le=1)
    """Probability that a step goes to a side instead of ahead (2/3 in Gymnasium)."""
    min_distance: int = Field(2, ge=1)
    """Minimum number of steps from the start to the goal."""

    def check_keys(self) -> None:
        if self.max_moves < self.min_distance:
            raise ValueError(
                f"max_moves={self.max_moves} is less than min_distance={self.min_distance}: raise "
                "max_moves"
            )


PLAYER, ICE, HOLE, GOAL = "P.OG"
SNOW: Rgb = (215, 235, 250)
WATER: Rgb = (20, 40, 90)
MARKS_BY_SIGN: dict[str, Sequence[Mark]] = {
    HOLE: [("circle", WATER)],
    GOAL: [("square", COLOURS["green"])],
}

Lake = tuple[str, int]  # (the map without the player, row by row; the player's cell)


class FrozenLake(BoardGame[Lake]):
    """The frozen lake as an environment."""

    name = "frozen_lake"

    def __init__(self, config: FrozenLakeConfig) -> None:
        super().__init__(config)
        self.config = config
        self.size = config.size
        # The same game without slipping, in which `sample` searches a shortest path.
        self.without_slip = (
            FrozenLake(config.model_copy(update={"slip": 0.0})) if config.slip else self
        )

    def sample(self, rng: random.Random) -> Problem | None:
        cells = [HOLE if rng.random() < self.config.holes else ICE for _ in range(self.size**2)]
        start, goal = rng.sample(range(self.size**2), 2)
        cells[start], cells[goal] = ICE, GOAL
        lake = "".join(cells)
        without_slip = self.without_slip
        moves = find_shortest_path(
            (lake, start),
            lambda state: without_slip.has_won(state) is True,
            lambda state: iter_legal_moves(without_slip, state),
        )
        if moves is None or not self.config.min_distance <= len(moves) <= self.max_moves:
            return None
        seed = rng.getrandbits(32)
        return Problem(
            self.prompt((lake, start)), " ".join(moves), {"lake": lake, "start": start}, seed
        )

    def start(self, task: Task) -> Lake:
        return task.meta["lake"], task.meta["start"]

    def move(self, state: Lake, move: str, rng: random.Random) -> Lake | None:
        if move not in OFFSETS:
            return None
        return state[0], rng.choices(*zip(*self._list_outcomes(state[1], move), strict=True))[0]

    def _list_outcomes(self, cell: int, move: str) -> list[tuple[int, float]]:
        """Return the cells where a step may end, with their probabilities.

        A step over the edge leaves the player in place.
        """
        ahead = OFFSETS[move]
        sides = [(ahead[1], ahead[0]), (-ahead[1], -ahead[0])]
        slip = self.config.slip
        outcomes = []
        for (down, right), probability in zip(
            [ahead, *sides], [1 - slip, slip / 2, slip / 2], strict=True
        ):
            row, column = cell // self.size + down, cell % self.size + right
            is_inside = 0 <= row < self.size and 0 <= column < self.size
            outcomes.append((row * self.size + column if is_inside else cell, probability))
        return outcomes

    def has_won(self, state: Lake) -> bool | None:
        return {GOAL: True, HOLE: False}.get(state[0][state[1]])

    def show(self, state: Lake) -> str:
        lake, cell = state
        board = lake[:cell] + PLAYER + lake[cell + 1 :]
        return "\n".join(board[i : i + self.size] for i in range(0, len(board), self.size))

    def cells(self, state: Lake) -> Sequence[Sequence[tuple[Rgb, Sequence[Mark]]]]:
        lake, player_cell = state
        player_mark: Mark = ("triangle", COLOURS["red"])
        drawn_cells = [
            (SNOW, [*MARKS_BY_SIGN.get(sign, ()), *([player_mark] if cell == player_cell else [])])
            for cell, sign in enumerate(lake)
        ]
        return [drawn_cells[i : i + self.size] for i in range(0, len(drawn_cells), self.size)]

    def player(self, task: Task) -> Callable[[Lake], str]:
        """Return a player whose moves maximise the probability of winning in the moves left."""
        lake, _ = self.start(task)
        plan = self._plan_moves(lake)
        moves_after = iter(range(self.max_moves - 1, -1, -1))
        return lambda state: plan[next(moves_after)][state[1]]

    def _plan_moves(self, lake: str) -> list[list[str]]:
        """Return the best moves: plan[n][cell] is the best move if n moves remain after it.

        They are computed by value iteration, backwards from the last move (Bellman, 1957). A
        discount of 0.9999 prefers the shorter of two certain paths.
        """
        values = [float(cell == GOAL) for cell in lake]
        plan: list[list[str]] = []
        for _ in range(self.max_moves):
            win_probabilities = [
                {
                    move: sum(p * values[end] for end, p in self._list_outcomes(start, move))
                    for move in OFFSETS
                }
                for start in range(len(lake))
            ]
            plan.append(
                [
                    max(OFFSETS, key=probability_by_move.__getitem__)
                    for probability_by_move in win_probabilities
                ]
            )
            values = [
                float(cell == GOAL)
                if cell in (GOAL, HOLE)
                else 0.9999 * max(probability_by_move.values())
                for cell, probability_by_move in zip(lake, win_probabilities, strict=True)
            ]
        return plan

    def rules(self, board_is_text: bool = True) -> str:
        slip = (
            f" The ice is slippery: {self.config.slip:.0%} of your steps go to a side instead."
            if self.config.slip
            else ""
        )
        signs = (PLAYER, GOAL, ICE, HOLE)
        drawn = ("the red triangle", "the green square", "light", "dark discs")
        you, goal, ice, holes = signs if board_is_text else drawn
        return (
            f"You ({you}) stand on a frozen lake. Walk to the goal ({goal}) over the ice ({ice}) "
            "and stay out of the holes "
            f"({holes}).{slip} You have {self.max_moves} steps. End each message with up, down, "
            "left or right."
        )
