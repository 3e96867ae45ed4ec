"""Draw shapes and boards with Pillow.

No fonts and no antialiasing are used, so equal arguments give equal pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ratchet.data.formats.media import import_pillow

if TYPE_CHECKING:
    from PIL.Image import Image

Rgb = tuple[int, int, int]
# (left, top, right, bottom) in pixels; the right and bottom pixels belong to the box
Box = tuple[float, float, float, float]
Mark = tuple[str, Rgb]  # (the name of a shape or digits, the colour)

WHITE: Rgb = (255, 255, 255)
COLOURS: Mapping[str, Rgb] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 170),
    "orange": (245, 140, 30),
    "cyan": (60, 200, 220),
    "grey": (130, 130, 130),
}
# Bitmap of each digit: five rows of three pixels.
DIGITS = {
    "0": "111101101101111",
    "1": "010110010010111",
    "2": "111001111100111",
    "3": "111001111001111",
    "4": "101101111001001",
    "5": "111100111001111",
    "6": "111100111101111",
    "7": "111001010010010",
    "8": "111101111101111",
    "9": "111101111001111",
}


def create_image(width: int, height: int, colour: Rgb = WHITE) -> Image:
    """Return an image of one colour. Its sides are in pixels."""
    return import_pillow("drawing pictures").Image.new("RGB", (width, height), colour)


def draw(image: Image, mark: Mark, box: Box) -> None:
    """Draw a shape or a number inside a box."""
    name, colour = mark
    pen = import_pillow().ImageDraw.Draw(image)
    if name in SHAPES:
        SHAPES[name](pen, box, colour)
    else:
        _draw_number(pen, name, box, colour)


def draw_board(rows: Sequence[Sequence[tuple[Rgb, Sequence[Mark]]]], cell_px: int) -> Image:
    """Return a picture of a board, with a line of one pixel between cells.

    Args:
        rows: The background colour and the marks of each cell.
    """
    image = create_image(len(rows[0]) * cell_px, len(rows) * cell_px)
    pen = import_pillow().ImageDraw.Draw(image)
    margin = cell_px // 6
    for y, row in enumerate(rows):
        for x, (background, marks) in enumerate(row):
            left, top = x * cell_px, y * cell_px
            pen.rectangle((left, top, left + cell_px - 2, top + cell_px - 2), fill=background)
            for mark in marks:
                draw(
                    image,
                    mark,
                    (
                        left + margin,
                        top + margin,
                        left + cell_px - 2 - margin,
                        top + cell_px - 2 - margin,
                    ),
                )
    return image


def _draw_circle(pen: Any, box: Box, colour: Rgb) -> None:
    pen.ellipse(box, fill=colour)


def _draw_square(pen: Any, box: Box, colour: Rgb) -> None:
    pen.rectangle(box, fill=colour)


def _draw_triangle(pen: Any, box: Box, colour: Rgb) -> None:
    left, top, right, bottom = box
    pen.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=colour)


def _draw_cross(pen: Any, box: Box, colour: Rgb) -> None:
    left, top, right, bottom = box
    third = (right - left) / 3
    pen.rectangle((left, top + third, right, bottom - third), fill=colour)
    pen.rectangle((left + third, top, right - third, bottom), fill=colour)


def _draw_ring(pen: Any, box: Box, colour: Rgb) -> None:
    pen.ellipse(box, outline=colour, width=max(1, round((box[2] - box[0]) / 5)))


SHAPES: Mapping[str, Callable[[Any, Box, Rgb], None]] = {
    "circle": _draw_circle,
    "square": _draw_square,
    "triangle": _draw_triangle,
    "cross": _draw_cross,
    "ring": _draw_ring,
}


def _draw_number(pen: Any, digits: str, box: Box, colour: Rgb) -> None:
    """Draw digits in the middle of a box."""
    left, top, right, bottom = box
    # Each bitmap pixel is drawn as a square of `dot` x `dot` image pixels. Adjacent digits are
    # separated by one such square.
    dot = max(1, int(min((right - left + 1) / (4 * len(digits) - 1), (bottom - top + 1) / 5)))
    x0 = left + (right - left + 1 - dot * (4 * len(digits) - 1)) // 2
    y0 = top + (bottom - top + 1 - dot * 5) // 2
    for position, digit in enumerate(digits):
        for i, bit in enumerate(DIGITS[digit]):
            x, y = x0 + (4 * position + i % 3) * dot, y0 + i // 3 * dot
            if bit == "1":
                pen.rectangle((x, y, x + dot - 1, y + dot - 1), fill=colour)
