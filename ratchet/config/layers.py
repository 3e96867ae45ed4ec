"""Merge the layers of a recipe: the recipe that it extends, overrides, and defaults of stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ratchet.config.diagnostics import RecipeProblem, suggest_name
from ratchet.config.key_paths import STAGES
from ratchet.config.registry import DEFAULT_KIND
from ratchet.config.resolve import section_class
from ratchet.config.schema import STAGE_KEYS
from ratchet.config.yaml_tree import COMMAND_LINE, MAX_NODES, Node, ValueOrigin
from ratchet.errors import ConfigError

KeyPath = tuple[str, ...]  # ("optimizer", "lr")

# Pairs of keys that set the same thing in two ways, by the key of their section ("" stands for the
# recipe or a stage). A layer that sets one key of a pair drops the other from the layer below.
ALTERNATIVES: Mapping[str, frozenset[str]] = {
    "": frozenset({"steps", "passes"}),
    "optimizer": frozenset({"warmup_steps", "warmup_share"}),
}

# Keys for the location of a data set and the format of its rows. If a layer names a published data
# set (`preset`), these keys of the layer below are dropped, unless that layer has a `preset` too.
PRESET = "preset"
REPLACED_BY_PRESET = frozenset(
    {
        "train",
        "test",
        "hub",
        "subset",
        "revision",
        "train_split",
        "test_split",
        "columns",
        "prompt",
        "answer_after",
    }
)


def merge(
    base: Node,
    overlay: Node,
    problems: list[RecipeProblem],
    *,
    key: str = "",
    names: Sequence[str] = (),
    default_kinds: Mapping[str, str] = DEFAULT_KIND,
) -> Node:
    """Return `base` deeply merged with `overlay`, which takes precedence.

    Two sections are joined, unless their `kind` differs. A section that overlays a list changes
    single items of the list. In all other cases `overlay` replaces `base`.

    Args:
        problems: Receives a problem for each item that the list does not have.
        key: The key of the two nodes, which determines their default kind.
        names: The names of the stages by position. A stage is addressed by its name or position.
        default_kinds: The kind of a section in `base` that has none, by key.
    """
    if isinstance(base.value, list) and overlay.is_section:
        return _merge_items(base, overlay, problems, names, default_kinds)
    if not (base.is_section and overlay.is_section) or _kinds_differ(
        base, overlay, default_kinds.get(key)
    ):
        return overlay
    children = dict(base.value)
    alternatives = ALTERNATIVES.get(key, frozenset())
    if not alternatives.isdisjoint(overlay.value):
        for name in alternatives:
            children.pop(name, None)
    if key == "environment" and PRESET in overlay.value and PRESET not in children:
        for name in REPLACED_BY_PRESET:
            children.pop(name, None)
    for name, child in overlay.value.items():
        if name in children:
            child = merge(
                children[name],
                child,
                problems,
                key=name,
                names=names,
                default_kinds=default_kinds,
            )
        children[name] = child
    return replace(base, value=children)


def _merge_items(
    base: Node,
    overlay: Node,
    problems: list[RecipeProblem],
    names: Sequence[str],
    default_kinds: Mapping[str, str],
) -> Node:
    """Return the list `base` with changed items; `overlay` names them by position or stage."""
    items = list(base.value)
    positions = {str(index): index for index in range(len(items))}
    if base.origin.path == STAGES:
        positions |= {name: index for index, name in enumerate(names)}
    for label, child in overlay.value.items():
        if label in positions:
            index = positions[label]
            items[index] = merge(items[index], child, problems, default_kinds=default_kinds)
        else:
            labels = names if base.origin.path == STAGES else list(positions)
            problems.append(
                RecipeProblem(
                    child.origin, f"there is no '{label}' here{suggest_name(label, labels)}"
                )
            )
    return replace(base, value=items)


def _kinds_differ(base: Node, overlay: Node, default_kind: str | None) -> bool:
    """True if `overlay` sets another kind than that of `base`, which may be the default.

    False if `base` sets no kind and there is no default. The sections are then merged, and all
    keys are checked later against the kind of `overlay`.
    """
    base_kind = base.scalar("kind") or default_kind
    overlay_kind = overlay.scalar("kind")
    return base_kind is not None and overlay_kind is not None and base_kind != overlay_kind


# --- stages


def stage_names(root: Node) -> list[str]:
    """Return the names of the stages by position; [] for a recipe without a list of stages."""
    stages = root.get(STAGES)
    if stages is None or not isinstance(stages.value, list):
        return []
    return [_stage_name(stage, root) or str(index) for index, stage in enumerate(stages.value)]


def _stage_name(stage: Node, root: Node) -> str | None:
    """Return the stage's `name`, or else its algorithm's kind (the class of "module:Class")."""
    if stage.get("name") is not None:
        return str(stage.scalar("name"))
    for algorithm in (stage.get("algorithm"), root.get("algorithm")):
        kind = None if algorithm is None else algorithm.scalar("kind")
        if kind is not None:
            return str(kind).rpartition(":")[2]
    return None


def expand(root: Node, problems: list[RecipeProblem]) -> Node:
    """Return the tree with every stage named and merged over the stage keys at the top.

    A recipe without `stages` gets one stage.
    """
    defaults = Node(
        {key: node for key, node in root.value.items() if key in STAGE_KEYS}, root.origin
    )
    other_keys = {key: node for key, node in root.value.items() if key not in STAGE_KEYS}
    stages = root.get(STAGES) or Node([Node({}, root.origin)], root.origin)
    if isinstance(stages.value, list):
        _check_size(defaults, stages.value)
        stages = replace(
            stages, value=[_complete(stage, defaults, problems) for stage in stages.value]
        )
    return replace(root, value={**other_keys, STAGES: stages})


def _check_size(defaults: Node, stages: Sequence[Node]) -> None:
    """Raise ConfigError if copying the keys at the top into each stage makes too many values."""
    n_values = sum(1 for _ in _iter_leaves(defaults, ())) * len(stages)
    if n_values > MAX_NODES:
        raise ConfigError(
            f"{stages[0].origin}: {len(stages):,} stages repeat the keys at the top, which makes "
            f"{n_values:,} values: a recipe holds at most {MAX_NODES:,}"
        )


def _complete(stage: Node, defaults: Node, problems: list[RecipeProblem]) -> Node:
    if not stage.is_section:
        return stage
    complete = replace(merge(defaults, stage, problems), origin=stage.origin)
    if "name" in complete.value:
        return complete
    # A stage without an algorithm is "unnamed" until validation refuses it.
    name = _stage_name(stage, defaults) or "unnamed"
    name_node = Node(name, complete.origin.below("name"))
    return replace(complete, value={"name": name_node, **complete.value})


# --- layers: a recipe changes the one that it extends, and overrides change a recipe


def apply_layer(base: Node, layer: Node, problems: list[RecipeProblem]) -> Node:
    """Return the recipe `base` with `layer` merged over it.

    A `stages` section in `layer` changes stages by name (`stages.grpo.steps`), and a `stages` list
    replaces them. A stage key at the top of `layer` would have no effect on stages of `base` that
    set the key themselves. Such a key is added to `problems`.
    """
    stages = layer.get(STAGES)
    if stages is None or stages.is_section:
        _report_shadowed_keys(base, layer, problems)
    if stages is not None and stages.is_section and STAGES not in base.value:
        layer = _address_single_stage(base, layer, stages, problems)
    return merge(base, layer, problems, names=stage_names(base))


def _address_single_stage(
    base: Node, layer: Node, stages: Node, problems: list[RecipeProblem]
) -> Node:
    """Return the layer with keys like `stages.grpo.steps` moved to the top.

    This is for a recipe without `stages`, which has the keys of its one stage at the top.
    """
    name = _stage_name(Node({}, base.origin), base) or "0"
    top = replace(layer, value={key: node for key, node in layer.value.items() if key != STAGES})
    for label, child in stages.value.items():
        if label not in (name, "0"):
            problems.append(
                RecipeProblem(
                    child.origin, f"there is no '{label}' here{suggest_name(label, [name])}"
                )
            )
        elif not child.is_section:
            problems.append(RecipeProblem(child.origin, "must be a section: keys and values"))
        else:
            top = merge(top, child, problems)
    return top


def _report_shadowed_keys(base: Node, layer: Node, problems: list[RecipeProblem]) -> None:
    """Add a problem for each stage key at the top of `layer` that a stage of `base` sets itself."""
    names = stage_names(base)
    stages = dict(zip(names, base.value[STAGES].value, strict=True)) if names else {}
    if stages:
        _check_size(
            replace(layer, value={k: v for k, v in layer.value.items() if k in STAGE_KEYS}),
            list(stages.values()),
        )
    for key in STAGE_KEYS:
        for path, leaf in _iter_leaves(layer.get(key), (key,)):
            setters = [
                name
                for name in stages
                if any(
                    _stage_sets(stages[name], alternative, base, layer)
                    for alternative in _list_alternatives(path)
                )
            ]
            if setters:
                # The fix names the stages whose kind has the key, or all if none has it.
                fixable = [name for name in setters if _has_key(stages[name], path)] or setters
                fix = " or ".join(".".join((STAGES, name, *path)) for name in fixable)
                problems.append(
                    RecipeProblem(
                        leaf.origin,
                        f"has no effect, because the stages set it themselves: set {fix} instead",
                    )
                )


def _list_alternatives(path: KeyPath) -> list[KeyPath]:
    """Return the path, and the paths of keys that set the same thing in another way."""
    *sections, last = path
    names = ALTERNATIVES.get(sections[-1] if sections else "", frozenset())
    return [path, *((*sections, name) for name in names if last in names - {name})]


def _iter_leaves(node: Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, Node]]:
    if node is not None and not node.is_section:
        yield path, node
    elif node is not None:
        for key, child in node.value.items():
            yield from _iter_leaves(child, (*path, key))


def _stage_sets(stage: Node, path: KeyPath, base: Node, layer: Node) -> bool:
    """True if a stage sets the value itself, or gives the section another kind than the recipe.

    The recipe's kind is that of `layer`, or else of `base`, or else the default.
    """
    node: Node | None = stage
    for key in path:
        node = node.get(key) if node is not None else None
        if node is not None and not node.is_section:
            return True
    if node is not None:
        return True
    key = path[0]
    kinds = [
        section.scalar("kind")
        for root in (stage, layer, base)
        if (section := root.get(key)) is not None
    ]
    stage_section = stage.get(key)
    if stage_section is None or stage_section.scalar("kind") is None:
        return False
    default = next((kind for kind in kinds[1:] if kind is not None), DEFAULT_KIND.get(key))
    return stage_section.scalar("kind") != default


def _has_key(stage: Node, path: KeyPath) -> bool:
    """True if the kind that the stage chose for the section has the key, or the kind is unknown."""
    section = stage.get(path[0])
    kind = section.scalar("kind") if section is not None else None
    if kind is None or len(path) < 2:
        return True
    try:
        return path[1] in section_class(path[0], str(kind)).model_fields
    except ConfigError:
        return True


def merge_overrides(overrides: Mapping[KeyPath, Node], problems: list[RecipeProblem]) -> Node:
    """Return one layer made of all overrides of the command line.

    They are merged with each other before they are merged over the recipe, so their order is
    irrelevant: `kind` may come after the keys of its section, and a list after keys of its items.
    """
    layer = Node({}, ValueOrigin(COMMAND_LINE, None, ""))
    for path, node in sorted(overrides.items(), key=_order_lists):
        for depth in range(len(path) - 1, -1, -1):
            node = Node({path[depth]: node}, replace(node.origin, path=".".join(path[:depth])))
        layer = merge(layer, node, problems, names=stage_names(layer), default_kinds={})
    return layer


def _order_lists(override: tuple[KeyPath, Node]) -> tuple[bool, int]:
    """Return the sort key by which lists come first, outer before inner ones.

    All else keeps its order.
    """
    path, node = override
    is_list = isinstance(node.value, list)
    return (not is_list, len(path) if is_list else 0)
