"""An environment whose tool answers with images: find a square, look closer, and read its digit.

The first message shows a small copy of a picture, without the digits, which are too small for it.
Zooming into a cell shows that cell of the full picture. It is a test bed for image tools such as
those of DeepEyes (arXiv:2505.14362), and needs no download.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from ratchet.config.sections import EnvironmentConfig
from ratchet.data.formats.media import embed
from ratchet.environments.games.rendering import COLOURS, WHITE, create_image, draw
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.environments.tool_use.base import (
    ToolError,
    check_arguments,
    describe_unknown_tool,
    make_tool_schema,
)
from ratchet.protocols import Step
from ratchet.types import Message, Part, Task, ToolCall

PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "row": {"type": "integer", "description": "Row of the cell, from 1 at the top."},
        "column": {"type": "integer", "description": "Column of the cell, from 1 at the left."},
    },
    "required": ["row", "column"],
}
ZOOM = re.compile(r"\s*zoom\s+(\d{1,3})\s+(\d{1,3})\s*")


class ImageZoomConfig(EnvironmentConfig):
    """Coloured squares with small digits, which can be read after zooming into a cell."""

    builds: ClassVar[str] = "ratchet.environments.toy.image_zoom:ImageZoom"
    default_reward: ClassVar[str] = "exact_match"
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rows", "rollouts"})
    needs_media: ClassVar[bool] = True

    grid: int = Field(3, ge=2, le=8)
    """Number of cells on a side of the picture."""
    squares: int = Field(3, ge=1, le=len(COLOURS))
    """Number of squares, each of another colour."""
    cell_px: int = Field(32, ge=16, le=256)
    """Side of a cell, in pixels."""
    shrink: int = Field(2, ge=2, le=16)
    """Factor by which the picture of the first message is smaller on each side."""
    max_zooms: int = Field(3, ge=1, le=100)
    """Number of zooms; a further one ends the attempt."""
    actions: Literal["text", "tools"] = "text"
    """Form of a zoom. text: a message such as `zoom 2 3`. tools: a call of the tool zoom, for a
    model whose chat template has tool calls."""

    def check_keys(self) -> None:
        if self.squares > self.grid**2:
            raise ValueError(
                f"squares={self.squares} don't fit into grid={self.grid}: set squares to "
                f"{self.grid**2} or less"
            )


class ImageZoom(Procedural):
    """An environment of pictures whose details can be seen after zooming into a cell."""

    name = "image_zoom"

    def __init__(self, config: ImageZoomConfig) -> None:
        self.config = config
        self._uses_tools = config.actions == "tools"

    def sample(self, rng: random.Random) -> Problem:
        config = self.config
        cells = rng.sample(range(config.grid**2), config.squares)
        colours = rng.sample(sorted(COLOURS), config.squares)
        squares = [
            [colour, *divmod(cell, config.grid), rng.randrange(10)]
            for cell, colour in zip(cells, colours, strict=True)
        ]
        colour, row, column, digit = squares[0]
        meta = {"squares": squares, "row": row, "column": column}
        prompt = f"Which digit is on the {colour} square? {self._explain()}"
        return Problem(prompt, str(digit), meta, key=json.dumps([colour, sorted(squares)]))

    def _explain(self) -> str:
        how = "Call zoom" if self._uses_tools else "Say zoom ROW COLUMN"
        return f"{how} to see a cell of the {self.config.grid} x {self.config.grid} closely."

    def messages(self, problem: Problem) -> tuple[Message, ...]:
        side = self.config.grid * self.config.cell_px // self.config.shrink
        picture = self._draw(problem.meta["squares"], with_digits=False)
        overview = embed(picture.resize((side, side)))
        return (Message("user", (overview, Part("text", problem.prompt))),)

    def _draw(self, squares: Sequence[Sequence[Any]], *, with_digits: bool = True) -> Any:
        """Return the full picture. A digit takes about a quarter of its cell's side."""
        cell = self.config.cell_px
        image = create_image(self.config.grid * cell, self.config.grid * cell)
        for colour, row, column, digit in squares:
            x, y = column * cell, row * cell
            margin = cell // 8
            box = (x + margin, y + margin, x + cell - margin - 1, y + cell - margin - 1)
            draw(image, ("square", COLOURS[colour]), box)
            inner = 3 * cell // 8
            box = (x + inner, y + inner, x + cell - inner - 1, y + cell - inner - 1)
            if with_digits:
                draw(image, (str(digit), WHITE), box)
        return image

    def _crop(self, task: Task, row: int, column: int) -> Part:
        """Return a cell of the full picture, twice as large. Rows and columns count from 1."""
        grid, cell = self.config.grid, self.config.cell_px
        if not (1 <= row <= grid and 1 <= column <= grid):
            raise ToolError(f"there is no cell {row} {column}: rows and columns are 1 to {grid}")
        x, y = (column - 1) * cell, (row - 1) * cell
        crop = self._draw(task.meta["squares"]).crop((x, y, x + cell, y + cell))
        return embed(crop.resize((2 * cell, 2 * cell), 0))  # 0: each pixel becomes four

    # --- the protocol

    @property
    def has_tools(self) -> bool:
        return self._uses_tools

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        if not self._uses_tools:
            return ()
        return (make_tool_schema("zoom", "Shows a cell of the picture closely.", PARAMETERS),)

    async def reset(self, task: Task) -> Sequence[Message]:
        self._current_task, self._n_zooms = task, 0
        return task.messages

    async def step(self, message: Message) -> Step:
        """Answer zooms with images. Any other message is the final answer."""
        zooms = self._read_zooms(message)
        if not zooms or self._n_zooms + len(zooms) > self.config.max_zooms:
            return Step(done=True)
        self._n_zooms += len(zooms)
        replies, n_errors = list[Message](), 0
        for call in zooms:
            try:
                reply = self._zoom(self._current_task, call)
            except ToolError as error:
                reply = self._reply(call, f"Error: {error}")
                n_errors += 1
            replies.append(reply)
        return Step(tuple(replies), metrics={"zooms": len(zooms), "zoom_errors": n_errors})

    def _read_zooms(self, message: Message) -> Sequence[ToolCall]:
        if self._uses_tools:
            return message.tool_calls
        match = ZOOM.fullmatch(message.text)
        if match is None:
            return ()
        return (ToolCall("", "zoom", {"row": int(match[1]), "column": int(match[2])}),)

    def _zoom(self, task: Task, call: ToolCall) -> Message:
        if call.name != "zoom":
            raise ToolError(describe_unknown_tool(call.name, ["zoom"]))
        check_arguments(PARAMETERS, call.arguments)
        return self._reply(call, (self._crop(task, **call.arguments),))

    def _reply(self, call: ToolCall, content: str | tuple[Part, ...]) -> Message:
        if self._uses_tools:
            return Message("tool", content, tool_call_id=call.id)
        return Message("user", content)

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return a zoom into the cell of the question, and the answer."""
        row, column = task.meta["row"] + 1, task.meta["column"] + 1
        call = ToolCall("call_0", "zoom", {"row": row, "column": column})
        asking = (
            Message("assistant", tool_calls=(call,))
            if self._uses_tools
            else Message("assistant", f"zoom {row} {column}")
        )
        return asking, self._zoom(task, call), Message("assistant", str(task.answer))
