"""Variables of the chat template that a task sets, such as its level of reasoning effort."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import meta

from ratchet.data.chat.chat_templates import parse_template
from ratchet.data.chat.renderer import Renderer
from ratchet.errors import DataError
from ratchet.types import TEMPLATE_VARIABLES, Task

# The derived renderers of each renderer, by the variables as JSON.
_renderers: WeakKeyDictionary[Renderer, dict[str, Renderer]] = WeakKeyDictionary()


def get_task_renderer(renderer: Renderer, task: Task) -> Renderer:
    """Return the renderer with the task's variables of the chat template, or `renderer` itself.

    Raises DataError for a variable that the template does not read.
    """
    variables: Mapping[str, Any] = task.meta.get(TEMPLATE_VARIABLES) or {}
    if not variables:
        return renderer
    derived = _renderers.setdefault(renderer, {})
    key = json.dumps(variables, sort_keys=True)
    if key not in derived:
        derived[key] = _derive_renderer(renderer, variables)
    return derived[key]


def _derive_renderer(renderer: Renderer, variables: Mapping[str, Any]) -> Renderer:
    names = meta.find_undeclared_variables(parse_template(renderer.template.source))
    unread = next((name for name in variables if name not in names), None)
    if unread is not None:
        raise DataError(
            f"{unread}={variables[unread]} is set for the task, and the chat template does not "
            f"read it; it reads {', '.join(sorted(names)) or 'no variables'}"
        )
    derived = copy.copy(renderer)
    for name in list(vars(derived)):
        # What the renderer has found out about its template may differ with the variables.
        if isinstance(getattr(Renderer, name, None), cached_property):
            del vars(derived)[name]
    derived.template = renderer.template.with_variables(variables)
    return derived
