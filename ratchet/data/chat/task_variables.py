"""Variables of the chat template that a task sets, such as its level of reasoning effort."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from ratchet.data.chat.chat_templates import copy_without_cache
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.template_defaults import check_variables
from ratchet.types import TEMPLATE_VARIABLES, Task

# The derived renderers of each renderer, by the variables as JSON.
MAX_DERIVED = 64  # kept at once; a column may have another value in every row
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
        if len(derived) >= MAX_DERIVED:
            del derived[next(iter(derived))]  # the oldest
        derived[key] = _derive_renderer(renderer, variables)
    return derived[key]


def _derive_renderer(renderer: Renderer, variables: Mapping[str, Any]) -> Renderer:
    check_variables(renderer.template.source, variables, "variables of the task")
    derived = copy_without_cache(renderer)
    derived.template = renderer.template.with_variables(variables)
    return derived
