"""A sliding puzzle of numbered tiles on a square with one gap.

A move slides a neighbouring tile into the gap. The puzzle is solved when the tiles stand in order
and the gap is last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from pydantic import Field

from ratchet.environments.games.game import (
    OFFSETS,
    BoardConfig,
    BoardGame,
    find_shortest_path,
    iter_legal_moves,
    replay_moves,
)
from ratchet.environments.games.rendering import COLOURS, WHITE, Mark, Rgb
from ratchet.environments.single_turn import Problem
from ratchet.types import Task


class SlidingPuzzleConfig(BoardConfig):
    """Slide numbered tiles into order."""

    builds: ClassVar[str] = "ratchet.environments.games.sliding_puzzle:SlidingPuzzle"

    size: int = Field(3, ge=2, le=6)
    """Number of cells on a side."""
    shuffle_moves: int = Field(10, ge=1, le=1000)
    """Maximum number of random moves from the solved board to the initial board."""
    min_shuffle_moves: int = Field(1, ge=1)
    """Minimum number of random moves; the shortest solution may be shorter."""

    def check_keys(self) -> None:
        if self.min_shuffle_moves > self.shuffle_moves:
            raise ValueError(
                f"min_shuffle_moves={self.min_shuffle_moves} is more than "
                f"shuffle_moves={self.shuffle_moves}: lower min_shuffle_moves"
            )
        if self.max_moves < self.shuffle_moves:
            raise ValueError(
                f"max_moves={self.max_moves} can't undo shuffle_moves={self.shuffle_moves}: set "
                f"max_moves to {self.shuffle_moves} or more"
            )


Board = tuple[int, ...]  # row by row; 0 is the gap

OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


class SlidingPuzzle(BoardGame[Board]):
    """The sliding puzzle as an environment."""

    name = "sliding_puzzle"

    def __init__(self, config: SlidingPuzzleConfig) -> None:
        super().__init__(config)
        self.config = config
        self.size = config.size
        self.solved: Board = (*range(1, config.size**2), 0)

    def sample(self, rng: random.Random) -> Problem | None:
        board, shuffle = self.solved, list[str]()
        for _ in range(rng.randint(self.config.min_shuffle_moves, self.config.shuffle_moves)):
            board_by_move = dict(self._iter_slides(board))
            if shuffle:
                # No move reverses the previous one, so that moves do not cancel out.
                board_by_move.pop(OPPOSITE[shuffle[-1]])
            shuffle.append(rng.choice(list(board_by_move)))
            board = board_by_move[shuffle[-1]]
        if board == self.solved:
            return None
        solution = [OPPOSITE[move] for move in reversed(shuffle)]
        return Problem(self.prompt(board), " ".join(solution), {"board": list(board)})

    def start(self, task: Task) -> Board:
        return tuple(task.meta["board"])

    def move(self, state: Board, move: str, rng: random.Random) -> Board | None:
        return dict(self._iter_slides(state)).get(move)

    def _iter_slides(self, board: Board) -> Iterator[tuple[str, Board]]:
        """Yield each legal move and the board after it.

        A tile that slides up comes from the cell below the gap.
        """
        gap = board.index(0)
        row, column = divmod(gap, self.size)
        for move, (down, right) in OFFSETS.items():
            if 0 <= row - down < self.size and 0 <= column - right < self.size:
                tile = gap - down * self.size - right
                next_board = list(board)
                next_board[gap], next_board[tile] = board[tile], 0
                yield move, tuple(next_board)

    def has_won(self, state: Board) -> bool | None:
        return True if state == self.solved else None

    def show(self, state: Board) -> str:
        separator = " " if self.uses_word_style or self.size > 3 else ""
        width = len(str(self.size**2 - 1)) if separator else 1
        cells = [f"{tile or '_':>{width}}" for tile in state]
        return "\n".join(
            separator.join(cells[i : i + self.size]) for i in range(0, len(cells), self.size)
        )

    def cells(self, state: Board) -> Sequence[Sequence[tuple[Rgb, Sequence[Mark]]]]:
        drawn_cells = [
            (COLOURS["blue"], [(str(tile), WHITE)]) if tile else (COLOURS["grey"], [])
            for tile in state
        ]
        return [drawn_cells[i : i + self.size] for i in range(0, len(drawn_cells), self.size)]

    def player(self, task: Task) -> Callable[[Board], str]:
        """Return a player that makes the fewest moves, or the reversed shuffle if A* gives up."""
        start = self.start(task)
        moves = find_shortest_path(
            start, self.solved.__eq__, lambda board: iter_legal_moves(self, board), self._distance
        )
        return replay_moves(task.answer.split() if moves is None else moves)

    def _distance(self, board: Board) -> int:
        """Return the sum of the tiles' Manhattan distances from their places: the A* estimate."""
        positions = (
            (divmod(i, self.size), divmod(tile - 1, self.size))
            for i, tile in enumerate(board)
            if tile
        )
        return sum(
            abs(row - home_row) + abs(column - home_column)
            for (row, column), (home_row, home_column) in positions
        )

    def rules(self, board_is_text: bool = True) -> str:
        last, gap = self.size**2 - 1, "_" if board_is_text else "grey"
        return (
            f"Slide the tiles until they stand in order, 1 to {last} row by row, with the gap "
            f"({gap}) last. A move slides the "
            "tile next to the gap into it: up, down, left or right is the direction in which that "
            "tile moves. "
            f"You have {self.max_moves} moves. End each message with one of these words."
        )
