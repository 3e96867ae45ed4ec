"""A value that can be passed on but not read: it shows what a conversion does with it."""

from __future__ import annotations

from typing import Any


class Looked(Exception):
    """A conversion did something with a hidden value."""


def _raise(*_arguments: Any, **_named: Any) -> Any:
    raise Looked


USES = (
    "bool str repr format hash eq ne lt le gt ge len iter contains getitem call int float index "
    "complex round trunc floor ceil"
    " add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod pow rpow neg "
    "pos abs getattr"
)
# Only `is` and being handed on go unseen: a value handed on is found in what comes out.
Unseen: type = type(
    "Unseen", (), {f"__{use}__": _raise for use in USES.split()} | {"__class__": property(_raise)}
)
