"""Layers of a recipe laid over each other: `extends`, overrides, and the defaults of stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ratchet.config.diagnostics import RecipeProblem, unlike
from ratchet.config.key_paths import STAGES
from ratchet.config.registry import DEFAULT_KIND
from ratchet.config.resolve import section_class
from ratchet.config.schema import STAGE_KEYS
from ratchet.config.yaml_tree import MAX_NODES, Node
from ratchet.errors import ConfigError

Path = tuple[str, ...]


def merge(
    base: Node,
    over: Node,
    problems: list[RecipeProblem],
    *,
    key: str = "",
    names: Sequence[str] = (),
) -> Node:
    """Deep. Sections join; one whose `kind` differs replaces. A section over a list changes single
    items of it, by position or by one of `names`. Everything else replaces. What can't be meant is
    added to `problems`.
    """
    if isinstance(base.value, list) and over.is_section:
        return _merge_items(base, over, problems, names)
    if not (base.is_section and over.is_section) or _other_kind(base, over, key):
        return over
    joined = dict(base.value)
    for name, child in over.value.items():
        joined[name] = (
            merge(joined[name], child, problems, key=name, names=names) if name in joined else child
        )
    return replace(base, value=joined)


def _merge_items(
    base: Node, over: Node, problems: list[RecipeProblem], names: Sequence[str]
) -> Node:
    items = list(base.value)
    places = {str(index): index for index in range(len(items))}
    if base.origin.path == STAGES:
        places |= {name: index for index, name in enumerate(names)}
    for label, child in over.value.items():
        if label in places:
            index = places[label]
            items[index] = merge(items[index], child, problems)
        else:
            labels = names if base.origin.path == STAGES else list(places)
            problems.append(
                RecipeProblem(child.origin, f"there is no '{label}' here{unlike(label, labels)}")
            )
    return replace(base, value=items)


def _other_kind(base: Node, over: Node, key: str) -> bool:
    """A base without a kind serves any: its keys are then checked against the kind that is laid
    over it."""
    old = base.scalar("kind") or DEFAULT_KIND.get(key)
    new = over.scalar("kind")
    return old is not None and new is not None and old != new


# --- stages


def stage_names(root: Node) -> list[str]:
    """Return the names of the stages by position; [] for a recipe without a list of stages."""
    stages = root.get(STAGES)
    if stages is None or not isinstance(stages.value, list):
        return []
    return [_stage_name(stage, root) or str(index) for index, stage in enumerate(stages.value)]


def _stage_name(stage: Node, root: Node) -> str | None:
    """Its own, or its algorithm's kind; for a dotted kind the name of the class."""
    if stage.get("name") is not None:
        return str(stage.scalar("name"))
    for algorithm in (stage.get("algorithm"), root.get("algorithm")):
        kind = None if algorithm is None else algorithm.scalar("kind")
        if kind is not None:
            return str(kind).rpartition(":")[2]
    return None


def expand(root: Node, problems: list[RecipeProblem]) -> Node:
    """Return the resolved tree: each stage laid over the stage keys at the top, and named. Without
    `stages` there is one stage."""
    defaults = Node(
        {key: node for key, node in root.value.items() if key in STAGE_KEYS}, root.origin
    )
    rest = {key: node for key, node in root.value.items() if key not in STAGE_KEYS}
    stages = root.get(STAGES) or Node([Node({}, root.origin)], root.origin)
    if isinstance(stages.value, list):
        _refuse_product(defaults, stages.value)
        stages = replace(
            stages, value=[_complete(stage, defaults, problems) for stage in stages.value]
        )
    return replace(root, value={**rest, STAGES: stages})


def _refuse_product(defaults: Node, stages: Sequence[Node]) -> None:
    """Raise ConfigError if keys at the top, which each stage repeats, come to more values than a
    recipe may have."""
    repeated = sum(1 for _ in _leaves(defaults, ())) * len(stages)
    if repeated > MAX_NODES:
        raise ConfigError(
            f"{stages[0].origin}: {len(stages):,} stages repeat the keys at the top, which makes "
            f"{repeated:,} values: a recipe "
            f"holds at most {MAX_NODES:,}"
        )


def _complete(stage: Node, defaults: Node, problems: list[RecipeProblem]) -> Node:
    if not stage.is_section:
        return stage
    whole = replace(merge(defaults, stage, problems), origin=stage.origin)
    if "name" in whole.value:
        return whole
    name = _stage_name(stage, defaults) or "unnamed"  # without an algorithm, which is refused
    return replace(whole, value={"name": Node(name, whole.origin.below("name")), **whole.value})


# --- a layer: a recipe over the one that it extends, or all overrides over a recipe


def lay(base: Node, layer: Node, problems: list[RecipeProblem]) -> Node:
    """Merge whole recipes.

    `stages` as a section changes stages by name (`stages.grpo.steps`), as a list it replaces them.
    A stage key at the top that the stages of `base` set themselves would do nothing, and is a
    problem.
    """
    stages = layer.get(STAGES)
    if stages is None or stages.is_section:
        _refuse_shadowed(base, layer, problems)
    if stages is not None and stages.is_section and STAGES not in base.value:
        layer = _address_single_stage(base, layer, stages, problems)
    return merge(base, layer, problems, names=stage_names(base))


def _address_single_stage(
    base: Node, layer: Node, stages: Node, problems: list[RecipeProblem]
) -> Node:
    """Apply `stages.grpo.steps` to a recipe without `stages`, whose one stage has its keys at the
    top."""
    name = _stage_name(Node({}, base.origin), base) or "0"
    rest = replace(layer, value={key: node for key, node in layer.value.items() if key != STAGES})
    for label, child in stages.value.items():
        if label not in (name, "0"):
            problems.append(
                RecipeProblem(child.origin, f"there is no '{label}' here{unlike(label, [name])}")
            )
        elif not child.is_section:
            problems.append(RecipeProblem(child.origin, "must be a section: keys and values"))
        else:
            rest = merge(rest, child, problems)
    return rest


def _refuse_shadowed(base: Node, layer: Node, problems: list[RecipeProblem]) -> None:
    names = stage_names(base)
    stages = dict(zip(names, base.value[STAGES].value, strict=True)) if names else {}
    if stages:
        _refuse_product(
            replace(layer, value={k: v for k, v in layer.value.items() if k in STAGE_KEYS}),
            list(stages.values()),
        )
    for key in STAGE_KEYS:
        for path, leaf in _leaves(layer.get(key), (key,)):
            owners = {
                name: stage for name, stage in stages.items() if _sets(stage, path, base, layer)
            }
            if owners:
                able = [name for name, stage in owners.items() if _has_key(stage, path)] or list(
                    owners
                )
                fix = " or ".join(".".join((STAGES, name, *path)) for name in able)
                problems.append(
                    RecipeProblem(
                        leaf.origin,
                        f"has no effect, the stages set it themselves: set {fix} instead",
                    )
                )


def _leaves(node: Node | None, path: Path) -> Iterator[tuple[Path, Node]]:
    if node is not None and not node.is_section:
        yield path, node
    elif node is not None:
        for key, child in node.value.items():
            yield from _leaves(child, (*path, key))


def _sets(stage: Node, path: Path, base: Node, layer: Node) -> bool:
    """Return True if a stage gives the value itself, or chooses another kind for the section that
    has the key."""
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


def _has_key(stage: Node, path: Path) -> bool:
    """Return True if the kind that the stage chose for the section has the key, or if that is
    unknown."""
    section = stage.get(path[0])
    kind = section.scalar("kind") if section is not None else None
    if kind is None or len(path) < 2:
        return True
    try:
        return path[1] in section_class(path[0], str(kind)).model_fields
    except ConfigError:
        return True


def as_layer(overrides: Mapping[Path, Node], root: Node, problems: list[RecipeProblem]) -> Node:
    """Return all overrides as one layer, so that their order does not matter (`kind` may come after
    its keys)."""
    whole = root
    for path, node in overrides.items():
        for depth in range(len(path) - 1, -1, -1):
            node = Node({path[depth]: node}, replace(node.origin, path=".".join(path[:depth])))
        whole = merge(whole, node, problems)
    return whole
