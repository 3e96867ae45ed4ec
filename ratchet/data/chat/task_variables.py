"""Variables of the chat template that a task or a request sets, such as `enable_thinking`."""

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
    variables = task.meta.get(TEMPLATE_VARIABLES) or {}
    return get_renderer_with(renderer, variables, "variables of the task")


def get_renderer_with(renderer: Renderer, variables: Mapping[str, Any], setter: str) -> Renderer:
    """Return the renderer with variables of the chat template, or `renderer` itself for none.

    Raises DataError for a variable that the template does not read.

    Args:
        setter: The data or the field that sets the variables, for the error.
    """
    if not variables:
        return renderer
    derived = _renderers.setdefault(renderer, {})
    key = json.dumps(variables, sort_keys=True)
    if key not in derived:
        if len(derived) >= MAX_DERIVED:
            del derived[next(iter(derived))]  # the oldest
        check_variables(renderer.template.source, variables, setter)
        derived[key] = copy_without_cache(renderer)
        derived[key].template = renderer.template.with_variables(variables)
    return derived[key]
