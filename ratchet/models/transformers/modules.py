"""Find and replace the modules of a model."""

from __future__ import annotations

import copy

from torch import nn


def find_largest_module_list(module: nn.Module) -> list[nn.Module]:
    """Return the modules of the `ModuleList` with the most parameters; [] if there is none."""
    module_lists = [
        inner for inner in module.modules() if isinstance(inner, nn.ModuleList) and len(inner)
    ]
    return (
        list(max(module_lists, key=lambda modules: sum(p.numel() for p in modules.parameters())))
        if module_lists
        else []
    )


def replace_submodule(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Return a shallow copy of `model` with another module at `path`; parameters are shared.

    With the path "" the result is the other module.
    """
    if not path:
        return module
    name, _, child_path = path.partition(".")
    clone = copy.copy(model)
    new_child = replace_submodule(model.get_submodule(name), child_path, module)
    clone.__dict__["_modules"] = {**model._modules, name: new_child}
    return clone
