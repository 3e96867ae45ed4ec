"""Sokoban: push every box ($) onto a goal (.). Boxes can't be pulled, and only one is pushed at a
time.

A room is made backwards: the boxes start on the goals and are pulled away, so that the reversed
pulls are a solution.
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
    neighbours,
    recited,
    shortest_way,
)
from ratchet.environments.games.rendering import COLOURS, Mark, Rgb
from ratchet.environments.single_turn import Problem
from ratchet.types import Task


class SokobanConfig(BoardConfig):
    """The section of Sokoban: push boxes onto goals."""

    builds: ClassVar[str] = "ratchet.environments.games.sokoban:Sokoban"

    max_moves: int = Field(
        30,
        ge=1,
        le=10_000,
        description="Messages of the player, those that are no legal move included.",
    )
    size: int = Field(4, ge=3, le=10, description="Cells a side, without the walls around.")
    boxes: int = Field(1, ge=1, le=5, description="Boxes, and goals.")
    walls: float = Field(0.1, ge=0, le=0.5, description="Chance of each inner cell to be a wall.")
    pulls: int = Field(
        3, ge=1, le=50, description="Pushes by which a room can be solved; fewer may do."
    )


# The usual characters: player and box, on the floor and on a goal.
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
    name = "sokoban"

    def __init__(self, config: SokobanConfig) -> None:
        super().__init__(config)
        self.config = config
        self.width = config.size + 2
        self.offsets = {move: down * self.width + right for move, (down, right) in OFFSETS.items()}
        inner = range(1, config.size + 1)
        self.inside = [row * self.width + column for row in inner for column in inner]

    def sample(self, rng: random.Random) -> Problem | None:
        """Return a room, or None if it has too few free cells, a box can't be pulled far enough or
        ends on a goal, or the solution is longer than `max_moves`."""
        walls = frozenset(range(self.width**2)) - {
            cell for cell in self.inside if rng.random() >= self.config.walls
        }
        free = [cell for cell in self.inside if cell not in walls]
        if len(free) < self.config.boxes + 2:
            return None
        *goals, player = rng.sample(free, self.config.boxes + 1)
        room, solution = Room(walls, frozenset(goals), frozenset(goals), player), list[str]()
        for _ in range(self.config.pulls):
            options = list(self._pulls(room))
            if not options:
                return None
            pulled, pushes = rng.choice(options)
            room, solution = pulled, [*pushes, *solution]
        if room.boxes & room.goals or len(solution) > self.max_moves:
            return None
        return Problem(self.prompt(room), " ".join(solution), {"room": self._drawn(room)})

    def _pulls(self, room: Room) -> Iterator[tuple[Room, list[str]]]:
        """Yield each room from which a push and then a walk lead to this one, with those moves."""
        for move, offset in self.offsets.items():
            for box in sorted(room.boxes):
                # After the push the box is at `box` and the player behind it; before the push, both
                # stood one cell further back.
                player, before = box - offset, box - 2 * offset
                blocked = room.walls | room.boxes
                if player in blocked or before in blocked:
                    continue
                pushed = room._replace(player=player)
                walk = self._walk(pushed, room.player)
                if walk is not None:
                    boxes = room.boxes - {box} | {player}
                    yield room._replace(boxes=boxes, player=before), [move, *walk]

    def _walk(self, room: Room, to: int) -> list[str] | None:
        """Return the player's shortest walk to the cell `to` without a push, or None."""
        blocked = room.walls | room.boxes

        def steps(cell: int) -> Iterator[tuple[str, int]]:
            return (
                (move, cell + offset)
                for move, offset in self.offsets.items()
                if cell + offset not in blocked
            )

        return shortest_way(room.player, to.__eq__, steps)

    def start(self, task: Task) -> Room:
        text = task.meta["room"]
        cells = {
            sign: frozenset(i for i, cell in enumerate(text) if cell == sign)
            for sign in {*text, *"#$*.@+"}
        }
        goals = cells["."] | cells["*"] | cells["+"]
        (player,) = cells["@"] | cells["+"]
        return Room(cells[WALL], goals, cells["$"] | cells["*"], player)

    def move(self, state: Room, move: str, luck: random.Random) -> Room | None:
        if move not in self.offsets:
            return None
        offset = self.offsets[move]
        to, boxes = state.player + offset, state.boxes
        if to in boxes:
            if to + offset in state.walls | boxes:
                return None
            boxes = boxes - {to} | {to + offset}
        return None if to in state.walls else state._replace(boxes=boxes, player=to)

    def won(self, state: Room) -> bool | None:
        return True if state.boxes == state.goals else None

    def show(self, state: Room) -> str:
        drawn = self._drawn(state)
        return "\n".join(drawn[i : i + self.width] for i in range(0, len(drawn), self.width))

    def cells(self, state: Room) -> Sequence[Sequence[tuple[Rgb, Sequence[Mark]]]]:
        def cell(at: int) -> tuple[Rgb, Sequence[Mark]]:
            marks: list[Mark] = [("square", COLOURS["orange"])] if at in state.boxes else []
            marks += [("circle", COLOURS["blue"])] if at == state.player else []
            marks += [("ring", COLOURS["red"])] if at in state.goals else []
            return STONE if at in state.walls else FLOOR, marks

        return [
            [cell(row * self.width + column) for column in range(self.width)]
            for row in range(self.width)
        ]

    def _drawn(self, room: Room) -> str:
        def sign(cell: int) -> str:
            thing = "player" if cell == room.player else "box" if cell in room.boxes else "floor"
            return WALL if cell in room.walls else SIGNS[thing][cell in room.goals]

        return "".join(map(sign, range(self.width**2)))

    def player(self, task: Task) -> Callable[[Room], str]:
        """Return a player that makes the fewest moves, or those of the task's solution if the
        search gives up."""
        room = self.start(task)
        way = shortest_way(room, lambda at: self.won(at) is True, lambda at: neighbours(self, at))
        return recited(task.answer.split() if way is None else way)

    def rules(self, in_text: bool = True) -> str:
        signs, drawn = (
            ("@, on a goal +", "$", ".; with a box on it *", "#"),
            ("the blue disc", "orange", "red rings", "dark"),
        )
        you, boxes, goals, walls = signs if in_text else drawn
        return (
            f"You ({you}) push boxes ({boxes}) onto the goals ({goals}) in a room with walls "
            f"({walls}). You can "
            f"push one box at a time, and pull none. You have {self.max_moves} moves. End each "
            "message with up, down, left or "
            "right."
        )
