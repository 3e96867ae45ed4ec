"""Defaults of a chat template's variables, written into the template itself.

So everything that renders by the template agrees: training, evaluation, `ratchet chat` and `serve`,
and transformers, vLLM or TRL with the exported model. A variable that a caller passes still wins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import meta

from ratchet.data.chat.chat_templates import parse_template
from ratchet.errors import DataError

# A line that `set_defaults` wrote. Blocks are trimmed, so the newline is not rendered.
DEFAULT_LINE = re.compile(r"\{%- if (\w+) is not defined %\}\{%- set \1 = .* %\}\{%- endif %\}\n")


def set_defaults(source: str, variables: Mapping[str, Any]) -> str:
    """Return the template with defaults of its variables, which replace earlier defaults.

    Raises DataError for a variable that the template does not read.

    Args:
        source: Jinja text.
        variables: JSON values by name; without any, the template stays as it is.
    """
    if not variables:
        return source
    template = remove_defaults(source)
    check_variables(template, variables, "tokenizer.chat_template_kwargs")
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_write_literal(value)} %}}"
        "{%- endif %}\n"
        for name, value in variables.items()
    ]
    return "".join(lines) + template


def check_variables(source: str, variables: Iterable[str], setter: str) -> None:
    """Raise DataError for a variable that the template does not read.

    setter: The recipe's key, or the data, that sets the variables.
    """
    names = meta.find_undeclared_variables(parse_template(source))
    unread = next((name for name in variables if name not in names), None)
    if unread is not None:
        raise DataError(
            f"{setter}: the chat template does not read '{unread}'; it reads "
            f"{', '.join(sorted(names)) or 'no variables'}. Remove or rename '{unread}'"
        )


def remove_defaults(source: str) -> str:
    """Return the template without the defaults that `set_defaults` wrote."""
    while match := DEFAULT_LINE.match(source):
        source = source[match.end() :]
    return source


def _write_literal(value: Any) -> str:
    """Return a JSON value as a literal of Jinja, on one line."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(map(_write_literal, value))}]"
    if isinstance(value, Mapping):
        items = (f"{_write_literal(str(k))}: {_write_literal(v)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    return json.dumps(value, ensure_ascii=False)
