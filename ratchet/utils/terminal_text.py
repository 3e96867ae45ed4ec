"""Make untrusted text safe to print: data, completions, file names and recipe keys may hold
anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def escape_controls(text: str) -> str:
    """Return `text` with every character that could control a terminal replaced by its code.

    Line ends and tabs stay. All other control characters (C0, DEL, C1) are replaced, and so are
    line and paragraph separators, direction marks (Unicode TR9), invisible characters that make
    different texts look alike, and halves of surrogate pairs.
    """
    return text if text.isascii() and text.isprintable() else text.translate(_ESCAPES)


def escape_surrogates(text: str) -> str:
    """Return `text` with halves of surrogate pairs replaced by codes: UTF-8 can't encode them."""
    return text.encode("utf-8", "backslashreplace").decode()


def shorten_text(text: str, limit: int) -> str:
    """Return `text` cut to `limit` characters. A cut text ends in "..."."""
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def get_first_line(text: str) -> str:
    """Return the first non-blank line of a library's error, cut to 400 characters."""
    lines = (line.strip() for line in text.splitlines())
    return shorten_text(next(filter(None, lines), "no reason is given"), 400)


def make_console(file: IO[str] | None = None, *, soft_wrap: bool = False) -> Console:
    """Create a rich console that escapes all printed text, in tables too.

    Styles and rich's own control codes are kept.

    Args:
        file: The output; None: standard output.
    """
    from rich.console import Console, ConsoleRenderable, RenderHook
    from rich.segment import Segment

    class EscapedRenderable:
        def __init__(self, inner: ConsoleRenderable) -> None:
            self.inner = inner

        def __rich_console__(self, console: Console, options: Any) -> Iterable[Segment]:
            for segment in console.render(self.inner, options):
                yield (
                    segment
                    if segment.control
                    else Segment(escape_controls(segment.text), segment.style)
                )

    class EscapeHook(RenderHook):
        def process_renderables(
            self, renderables: list[ConsoleRenderable]
        ) -> list[ConsoleRenderable]:
            return [EscapedRenderable(renderable) for renderable in renderables]

    console = Console(file=file, soft_wrap=soft_wrap)
    console.push_render_hook(EscapeHook())
    return console


class _EscapeTable(dict[int, str | int]):
    """A table for `str.translate` that computes its entries on demand."""

    def __missing__(self, point: int) -> str | int:
        escaped = _format_escape(point) if _is_control(point) else point
        self[point] = escaped
        return escaped


def _is_control(point: int) -> bool:
    return (
        (point < 32 and point not in (9, 10))
        or 0x7F <= point <= 0x9F
        or point in (0x061C, 0x2028, 0x2029, 0xFEFF)
        # 0x200C and 0x200D stay: Persian and emoji need these joiners.
        or point in (0x200B, 0x200E, 0x200F)
        or 0x202A <= point <= 0x202E
        or 0x2060 <= point <= 0x206F
        or 0xD800 <= point <= 0xDFFF
        or 0xFFF9 <= point <= 0xFFFB
        or 0xE0000 <= point <= 0xE007F
    )


def _format_escape(point: int) -> str:
    return (
        f"\\x{point:02x}"
        if point < 256
        else f"\\u{point:04x}"
        if point < 65536
        else f"\\U{point:08x}"
    )


_ESCAPES = _EscapeTable()
