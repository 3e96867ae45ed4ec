"""Sokoban: push every box ($) onto a goal (.).

Boxes can't be pulled, and only one can be pushed at a time. A room is generated backwards: the
boxes start on the goals and are pulled away, so that the reversed pulls are a solution.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

from pydantic import Field

from ratchet.environments.games.game import (
    OFFSETS,
    BoardConfig,
    BoardGame,
    find_shortest_path,
    iter_legal_moves,
    replay_moves,
)
from ratchet.environments.games.rendering import COLOURS, Mark, Rgb
from ratchet.environments.single_turn import Problem
from ratchet.types import Task


class SokobanConfig(BoardConfig):
    """Push boxes onto goals."""

    builds: ClassVar[str] = "ratchet.environments.games.sokoban:Sokoban"

    max_moves: int = Field(30, ge=1, le=10_000)
    """Maximum number of messages of the player, including illegal moves."""
    size: int = Field(4, ge=3, le=10)
    """Cells on a side, without the outer walls."""
    boxes: int = Field(1, ge=1, le=5)
    """Number of boxes and of goals."""
    walls: float = Field(0.1, ge=0, le=0.5)
    """Probability that an inner cell is a wall."""
    pulls: int = Field(3, ge=1, le=50)
    """Number of pushes in the known solution; fewer may suffice."""


# Sokoban's usual characters. Each pair shows the content on the floor, then on a goal.
SIGNS = {"player": "@+", "box": "$*", "floor": " ."}
WALL = "#"
STONE: Rgb = (70, 70, 80)
FLOOR: Rgb = (235, 230, 215)


class Room(NamedTuple):
    """A state of the game. Cells are numbered row by row, including the outer walls."""

    walls: frozenset[int]
    goals: frozenset[int]
    boxes: frozenset[int]
    player: int


class Sokoban(BoardGame[Room]):
    """Sokoban as an environment."""

    name = "sokoban"

    def __init__(self, config: SokobanConfig) -> None:
        super().__init__(config)
        self.config = config
        self.width = config.size + 2
        self.offsets = {move: down * self.width + right for move, (down, right) in OFFSETS.items()}
        inner = range(1, config.size + 1)
        self.inside = [row * self.width + column for row in inner for column in inner]

    def sample(self, rng: random.Random) -> Problem | None:
        """Return a room, or None if the drawn one is unsuitable.

        It may have too few free cells, a box that can't be pulled far enough or ends on a goal, or
        a solution that is longer than `max_moves`.
        """
        walls = frozenset(range(self.width**2)) - {
            cell for cell in self.inside if rng.random() >= self.config.walls
        }
        free = [cell for cell in self.inside if cell not in walls]
        if len(free) < self.config.boxes + 2:
            return None
        *goals, player = rng.sample(free, self.config.boxes + 1)
        room = Room(walls, frozenset(goals), frozenset(goals), player)
        solution = list[str]()
        for _ in range(self.config.pulls):
            options = list(self._iter_pulls(room))
            if not options:
                return None
            room, moves = rng.choice(options)
            solution = [*moves, *solution]
        if room.boxes & room.goals or len(solution) > self.max_moves:
            return None
        return Problem(self.prompt(room), " ".join(solution), {"room": self._write_room(room)})

    def _iter_pulls(self, room: Room) -> Iterator[tuple[Room, list[str]]]:
        """Yield each room that can precede `room`, with the moves from the earlier room to `room`.

        The moves are a push, and then a walk.
        """
        for move, offset in self.offsets.items():
            for box in sorted(room.boxes):
                # After the push the box is at `box` and the player behind it. Before the push both
                # were one cell further back.
                player, previous_player = box - offset, box - 2 * offset
                blocked = room.walls | room.boxes
                if player in blocked or previous_player in blocked:
                    continue
                pushed = room._replace(player=player)
                walk = self._find_walk(pushed, room.player)
                if walk is not None:
                    boxes = room.boxes - {box} | {player}
                    yield room._replace(boxes=boxes, player=previous_player), [move, *walk]

    def _find_walk(self, room: Room, target: int) -> list[str] | None:
        """Return the player's shortest walk to the cell `target` without a push, or None."""
        blocked = room.walls | room.boxes

        def iter_steps(cell: int) -> Iterator[tuple[str, int]]:
            return (
                (move, cell + offset)
                for move, offset in self.offsets.items()
                if cell + offset not in blocked
            )

        return find_shortest_path(room.player, target.__eq__, iter_steps)

    def start(self, task: Task) -> Room:
        text = task.meta["room"]
        cells = {
            sign: frozenset(i for i, cell in enumerate(text) if cell == sign)
            for sign in {*text, *"#$*.@+"}
        }
        goals = cells["."] | cells["*"] | cells["+"]
        (player,) = cells["@"] | cells["+"]
        return Room(cells[WALL], goals, cells["$"] | cells["*"], player)

    def move(self, state: Room, move: str, rng: random.Random) -> Room | None:
        if move not in self.offsets:
            return None
        offset = self.offsets[move]
        target, boxes = state.player + offset, state.boxes
        if target in boxes:
            if target + offset in state.walls | boxes:
                return None
            boxes = boxes - {target} | {target + offset}
        return None if target in state.walls else state._replace(boxes=boxes, player=target)

    def has_won(self, state: Room) -> bool | None:
        return True if state.boxes == state.goals else None

    def show(self, state: Room) -> str:
        text = self._write_room(state)
        return "\n".join(text[i : i + self.width] for i in range(0, len(text), self.width))

    def cells(self, state: Room) -> Sequence[Sequence[tuple[Rgb, Sequence[Mark]]]]:
        def draw_cell(cell: int) -> tuple[Rgb, Sequence[Mark]]:
            marks: list[Mark] = [("square", COLOURS["orange"])] if cell in state.boxes else []
            marks += [("circle", COLOURS["blue"])] if cell == state.player else []
            marks += [("ring", COLOURS["red"])] if cell in state.goals else []
            return STONE if cell in state.walls else FLOOR, marks

        return [
            [draw_cell(row * self.width + column) for column in range(self.width)]
            for row in range(self.width)
        ]

    def _write_room(self, room: Room) -> str:
        def sign(cell: int) -> str:
            content = "player" if cell == room.player else "box" if cell in room.boxes else "floor"
            return WALL if cell in room.walls else SIGNS[content][cell in room.goals]

        return "".join(map(sign, range(self.width**2)))

    def player(self, task: Task) -> Callable[[Room], str]:
        """Return a player that makes the fewest moves, or the task's solution if A* gives up."""
        room = self.start(task)
        moves = find_shortest_path(
            room,
            lambda state: self.has_won(state) is True,
            lambda state: iter_legal_moves(self, state),
        )
        return replay_moves(task.answer.split() if moves is None else moves)

    def rules(self, board_is_text: bool = True) -> str:
        if board_is_text:
            you, boxes, goals, walls = "@, on a goal +", "$", ".; with a box on it *", "#"
        else:
            you, boxes, goals, walls = "the blue disc", "orange", "red rings", "dark"
        return (
            f"You ({you}) push boxes ({boxes}) onto the goals ({goals}) in a room with walls "
            f"({walls}). You can "
            f"push one box at a time, and pull none. You have {self.max_moves} moves. End each "
            "message with up, down, left or "
            "right."
        )
