"""YAML as a tree whose every value knows where it was written, so that an error found much later names file and line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ratchet.config.problems import Problem
from ratchet.errors import ConfigError

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Origin:
    """`file` is a path or "command line"; `path` the dotted path as an override would write it."""

    file: str
    line: int | None
    path: str

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def below(self, key: str) -> Origin:
        return replace(self, path=f"{self.path}.{key}" if self.path else key)


@dataclass(frozen=True, slots=True)
class Node:
    """`value`: a dict of nodes by key, a list of nodes, or a scalar."""

    value: Any
    origin: Origin

    @property
    def is_section(self) -> bool:
        return isinstance(self.value, dict)

    def get(self, key: str) -> Node | None:
        return self.value.get(key) if self.is_section else None

    def scalar(self, key: str) -> Any:
        """Value of a scalar child; None where there is no such child."""
        child = self.get(key)
        return None if child is None or isinstance(child.value, dict | list) else child.value

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def leaves(self) -> Iterator[Node]:
        if not self.is_section:
            yield self
            return
        for child in self.value.values():
            yield from child.leaves()


# --- scalars: the core schema of YAML 1.2, where PyYAML has that of 1.1 (1e-3 is text there, off and no are booleans,
# 010 is 8, 12:30:00 is 45000). Python's underscores in numbers are kept.

SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?\d+(_\d+)*", "-+0123456789"),
    ("float", r"[-+]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, starts in SCALARS:
        for start in starts:
            table.setdefault("" if start == "\0" else start, []).append(
                (f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"))
            )
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()  # pyright: ignore[reportAssignmentType]


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()  # pyright: ignore[reportAssignmentType]

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text)
        case "float":
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        case "str":
            return text
        case other:
            raise ConfigError(f"the YAML tag {other} is not for recipes: {node.start_mark}")


# --- reading


@dataclass
class _Reader:
    file: str
    problems: list[Problem] = field(default_factory=list)
    open_nodes: list[int] = field(default_factory=list)  # of the branch being read, against an anchor within itself

    def read(self, node: yaml.Node, path: str) -> Node:
        if id(node) in self.open_nodes:
            raise ConfigError(f"{self.file}:{node.start_mark.line + 1}: an anchor contains itself")
        self.open_nodes.append(id(node))
        origin = Origin(self.file, node.start_mark.line + 1, path)
        if isinstance(node, yaml.MappingNode):
            value: Any = self._section(node, origin)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.read(item, origin.below(_label(item, i)).path) for i, item in enumerate(node.value)]
        else:
            assert isinstance(node, yaml.ScalarNode)
            value = _scalar(node)
        self.open_nodes.pop()
        return Node(value, origin)

    def _section(self, node: yaml.MappingNode, origin: Origin) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag.endswith(":merge"):
                merged |= self._merged(value_node, origin)
                continue
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
            if not key:
                raise ConfigError(f"{self.file}:{line}: a key must be a word")
            child = self.read(value_node, origin.below(key).path)
            child = replace(child, origin=replace(child.origin, line=line))
            if key in own:
                first = own[key].origin.line
                self.problems.append(Problem(child.origin, f"is set twice, here and in line {first}: remove one"))
            own[key] = child
        return merged | own

    def _merged(self, node: yaml.Node, origin: Origin) -> dict[str, Node]:
        """Content of `<<: *anchor` or `<<: [*a, *b]`, where earlier ones win."""
        read = self.read(node, origin.path)
        found: dict[str, Node] = {}
        for item in reversed(read.value if isinstance(read.value, list) else [read]):
            if not item.is_section:
                raise ConfigError(f"{item.origin}: << must name an anchor of a section")
            found |= item.value
        return found


def _label(item: yaml.Node, index: int) -> str:
    """Items are called by their `name` where they have one, as stages do; otherwise by their position."""
    if isinstance(item, yaml.MappingNode):
        for key, value in item.value:
            if key.value == "name" and isinstance(value, yaml.ScalarNode):
                return value.value
    return str(index)


def read_text(text: str, file: str, path: str = "") -> tuple[Node, list[Problem]]:
    """The tree of one YAML document, and its duplicate keys. Raises ConfigError where it isn't YAML."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = file if mark is None else f"{file}:{mark.line + 1}"
        detail = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{where}: is not YAML: {detail}") from error
    if root is None:
        return Node(None, Origin(file, None, path)), []
    reader = _Reader(file)
    return reader.read(root, path), reader.problems


def read_file(path: Path) -> tuple[Node, list[Problem]]:
    """Raises ConfigError for a file that is missing (naming one nearby), unreadable, empty, or no mapping of keys."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; a recipe is a YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no recipe {path}{_nearby(path)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    root, problems = read_text(text, str(path))
    if root.value is None:
        raise ConfigError(f"{path} is empty: a recipe needs at least model, algorithm and environment")
    if not root.is_section:
        raise ConfigError(f"{path} must hold keys and values (`model: ...`), not {_what(root.value)}")
    return root, problems


def _nearby(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f": there is no folder {folder}"
    recipes = sorted(p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml"))
    wanted = path.name if path.suffix in (".yaml", ".yml") else f"{path.name}.yaml"
    near = difflib.get_close_matches(wanted, recipes, n=1)
    return f": did you mean {folder / near[0]}?" if near else ""


def _what(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"just {value!r}"


def write_text(values: Mapping[str, Any]) -> str:
    """YAML that `read_text` reads back to equal values."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
