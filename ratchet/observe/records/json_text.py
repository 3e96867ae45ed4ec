"""Write any value of an agent or environment as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def format_json(value: Any) -> str:
    """Return a value as JSON, with the `repr` of objects that JSON does not support.

    The value may come from an agent or an environment. A value that can't be written at all (a
    cycle, a number of thousands of digits) becomes its `repr`. In a mapping, only the values and
    keys that can't be written are replaced.
    """
    text = _try_format_json(value)
    if text is not None:
        return text
    if not isinstance(value, Mapping):
        return json.dumps(_describe(value), ensure_ascii=False)
    members = []
    for key, item in value.items():
        name = json.dumps(key if isinstance(key, str) else _describe(key), ensure_ascii=False)
        content = _try_format_json(item) or json.dumps(_describe(item), ensure_ascii=False)
        members.append(f"{name}: {content}")
    return f"{{{', '.join(members)}}}"


def _try_format_json(value: Any) -> str | None:
    try:
        return json.dumps(value, default=_describe, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None


def _describe(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # user code raised, or the value is too deep or has too many digits
        return f"<{type(value).__name__}>"
