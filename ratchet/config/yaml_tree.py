"""Read YAML as a tree whose values keep their file and line, so that later errors can name them.

A recipe is read within a `Budget`, because a small malicious file can expand to a huge tree (with
anchors that repeat anchors), overflow the parser's stack or take hours to parse. The error for text
that is not YAML does not quote it, since a wrong path may point to a secret.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ratchet.config.diagnostics import RecipeProblem
from ratchet.errors import ConfigError
from ratchet.recipes import list_recipes, suggest_recipe
from ratchet.utils import safe_read
from ratchet.utils.terminal_text import shorten_text

COMMAND_LINE = "command line"
MAX_BYTES = 512 << 10  # PyYAML reads about 100 KiB a second
MAX_ENTRIES = 10_000  # keys and values in the files
MAX_NODES = 100_000  # values after anchors are expanded
MAX_DEPTH = 64
MAX_KEY_CHARS = 200
MAX_DIGITS = 100
SURROGATES = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ValueOrigin:
    """The place of a value, for error messages."""

    file: str
    """A path or "command line"."""
    line: int | None
    """None for a value of the command line."""
    path: str
    """The keys that lead to the value, joined by dots, as in an override."""

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def below(self, key: str) -> ValueOrigin:
        return replace(self, path=f"{self.path}.{key}" if self.path else key)


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the YAML tree: a dict of nodes by key, a list of nodes, or a scalar."""

    value: Any
    origin: ValueOrigin

    @property
    def is_section(self) -> bool:
        return isinstance(self.value, dict)

    def get(self, key: str) -> Node | None:
        return self.value.get(key) if self.is_section else None

    def scalar(self, key: str) -> Any:
        """Return the value of a scalar child; None if there is no such child."""
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


# --- scalars
# Recipes use the core schema of YAML 1.2, and numbers may have underscores, as in Python. PyYAML
# uses YAML 1.1, where 1e-3 is text, off and no are booleans, 010 is 8, and 12:30:00 is 45000.

# Each row: a tag, the pattern of its texts, and the characters with which they begin (\0: the empty
# text).
SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?\d+(_\d+)*", "-+0123456789"),
    ("float", r"[-+]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
)


def _build_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, starts in SCALARS:
        for start in starts:
            table.setdefault("" if start == "\0" else start, []).append(
                (f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"))
            )
    return table


@dataclass
class Budget:
    """The remaining budget of a recipe and all recipes that it extends."""

    bytes: int = MAX_BYTES
    """Size of the files."""
    entries: int = MAX_ENTRIES
    """Keys and values in the files."""
    nodes: int = MAX_NODES
    """Values after anchors are expanded."""

    def take_entry(self, file: str, line: int) -> None:
        """Count a key or value of a file. Raises ConfigError beyond MAX_ENTRIES."""
        self.entries -= 1
        if self.entries < 0:
            raise ConfigError(
                f"{file}:{line}: a recipe holds at most {MAX_ENTRIES:,} keys and values: move data "
                "to data files"
            )

    def take_node(self, where: ValueOrigin) -> None:
        """Count a value of the expanded tree. Raises ConfigError beyond MAX_NODES."""
        self.nodes -= 1
        if self.nodes < 0:
            raise ConfigError(
                f"{where}: anchors and merges expand this recipe to more than {MAX_NODES:,} "
                "values: use fewer"
            )


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _build_resolvers()  # pyright: ignore[reportAssignmentType]

    def __init__(self, text: str, file: str, budget: Budget) -> None:
        super().__init__(text)
        self.file, self.budget, self.depth = file, budget, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compose a node recursively as PyYAML does, within the budget and MAX_DEPTH."""
        self.budget.take_entry(self.file, self.line + 1)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            _refuse_depth(f"{self.file}:{self.line + 1}")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _refuse_depth(where: ValueOrigin | str) -> NoReturn:
    raise ConfigError(
        f"{where}: values are nested more than {MAX_DEPTH} deep: no recipe needs that"
    )


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _build_resolvers()  # pyright: ignore[reportAssignmentType]

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _read_scalar(node: yaml.ScalarNode, where: ValueOrigin) -> Any:
    """Return a scalar's value.

    Raises ConfigError for a tag outside the core schema, and for a malformed or too long number.
    """
    text = node.value
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return _parse_integer(text, where)
        case "float":
            try:
                return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
            except ValueError:  # `!!float x`
                raise ConfigError(f"{where}: {shorten_text(text, 40)!r} is not a number") from None
        case "str":
            return text
        case other:
            raise ConfigError(
                f"{where}: the YAML tag {shorten_text(other, 40)} is not for recipes: remove it"
            )


def _parse_integer(text: str, where: ValueOrigin) -> int:
    # Python converts at most 4,300 digits, and a float holds at most 308.
    if len(text) > MAX_DIGITS:
        raise ConfigError(
            f"{where}: a whole number of {len(text):,} digits is too large: write at most "
            f"{MAX_DIGITS}"
        )
    try:
        return int(text)
    except ValueError:  # `!!int x`
        raise ConfigError(f"{where}: {text!r} is not a whole number") from None


# --- reading


@dataclass
class _Reader:
    file: str
    budget: Budget
    problems: list[RecipeProblem] = field(default_factory=list)
    # ids of the nodes of the branch being read, to detect an anchor that contains itself
    open_nodes: list[int] = field(default_factory=list)

    def read(self, node: yaml.Node, path: str) -> Node:
        """Return the tree of a parsed YAML node. path: the keys that lead to it, joined by dots."""
        origin = ValueOrigin(self.file, node.start_mark.line + 1, path)
        if id(node) in self.open_nodes:
            raise ConfigError(f"{origin}: an anchor contains itself")
        self.budget.take_node(origin)
        if len(self.open_nodes) >= MAX_DEPTH:
            _refuse_depth(origin)
        self.open_nodes.append(id(node))
        if isinstance(node, yaml.MappingNode):
            value: Any = self._read_section(node, origin)
        elif isinstance(node, yaml.SequenceNode):
            value = [
                self.read(item, origin.below(_get_item_label(item, i)).path)
                for i, item in enumerate(node.value)
            ]
        else:
            assert isinstance(node, yaml.ScalarNode)
            value = _read_scalar(node, origin)
        self.open_nodes.pop()
        return Node(value, origin)

    def _read_section(self, node: yaml.MappingNode, origin: ValueOrigin) -> dict[str, Node]:
        """Return the children of a mapping. Its own keys override merged ones (`<<`)."""
        merged: dict[str, Node] = {}
        children: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag.endswith(":merge"):
                merged |= self._read_merge(value_node, origin)
                continue
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
            if not key:
                raise ConfigError(f"{self.file}:{line}: a key must be a word")
            _check_key(key, f"{self.file}:{line}")
            child = self.read(value_node, origin.below(key).path)
            child = replace(child, origin=replace(child.origin, line=line))
            if key in children:
                first_line = children[key].origin.line
                self.problems.append(
                    RecipeProblem(
                        child.origin, f"is set twice, here and in line {first_line}: remove one"
                    )
                )
            children[key] = child
        return merged | children

    def _read_merge(self, node: yaml.Node, origin: ValueOrigin) -> dict[str, Node]:
        """Return the content of `<<: *anchor` or `<<: [*a, *b]`, where earlier anchors win."""
        tree = self.read(node, origin.path)
        merged: dict[str, Node] = {}
        for item in reversed(tree.value if isinstance(tree.value, list) else [tree]):
            if not item.is_section:
                raise ConfigError(f"{item.origin}: << must name an anchor of a section")
            merged |= item.value
        return merged


def _check_key(key: str, where: str) -> None:
    """Raise ConfigError for a key that is too long, or that UTF-8 can't encode."""
    if len(key) > MAX_KEY_CHARS:
        raise ConfigError(
            f"{where}: a key has {len(key):,} characters, but at most {MAX_KEY_CHARS} are allowed"
        )
    if SURROGATES.search(key):
        raise ConfigError(f"{where}: the key {key!a} is not text: write it in UTF-8")


def check_key_path(keys: Sequence[str]) -> None:
    """Raise ConfigError for an override's keys that a recipe could not hold."""
    if len(keys) >= MAX_DEPTH:
        _refuse_depth(COMMAND_LINE)
    for key in keys:
        _check_key(key, COMMAND_LINE)


def _get_item_label(item: yaml.Node, index: int) -> str:
    """Return an item's `name` if it has one, as stages do; otherwise its position."""
    if isinstance(item, yaml.MappingNode):
        for key, value in item.value:
            if key.value == "name" and isinstance(value, yaml.ScalarNode):
                return shorten_text(value.value, MAX_KEY_CHARS)
    return str(index)


def read_yaml_error(error: yaml.YAMLError) -> tuple[yaml.Mark | None, str]:
    """Return the place of a syntax error, if it is known, and its first line."""
    first_line = str(error).partition("\n")[0]
    if isinstance(error, yaml.MarkedYAMLError):
        return error.problem_mark, error.problem or first_line
    return None, first_line


def read_text(
    text: str, file: str, path: str = "", budget: Budget | None = None
) -> tuple[Node, list[RecipeProblem]]:
    """Return the tree of one YAML document, and a problem for each duplicate key.

    Raises ConfigError for text that is not YAML or exceeds the budget.
    """
    budget = budget or Budget()
    try:
        root = _Loader(text, file, budget).get_single_node()
    except yaml.YAMLError as error:
        mark, detail = read_yaml_error(error)
        where = file if mark is None else f"{file}:{mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{where}: is not YAML: {_redact_names(detail)}") from error
    if root is None:
        return Node(None, ValueOrigin(file, None, path)), []
    reader = _Reader(file, budget)
    return reader.read(root, path), reader.problems


def _redact_names(detail: str) -> str:
    """Return PyYAML's message without quoted names, which may be content of a secret file.

    Quoted punctuation (at most two characters) and PyYAML's own <words> stay.
    """
    return shorten_text(
        re.sub(r"'([^']*)'", lambda quoted: quoted[0] if _is_mark(quoted[1]) else "a name", detail),
        200,
    )


def _is_mark(word: str) -> bool:
    return len(word) <= 2 or word.startswith("<")


def read_file(path: Path, budget: Budget | None = None) -> tuple[Node, list[RecipeProblem]]:
    """Return the tree of a file, and a problem for each duplicate key.

    Raises ConfigError if the file is missing (the message may suggest a similar name), unreadable,
    empty, too large, or not a mapping.
    """
    budget = budget or Budget()
    try:
        content = safe_read.read_bytes(path, MAX_BYTES)
        text = safe_read.decode_utf8(content)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no recipe {path}{_suggest_file(path)}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a directory; a recipe is a YAML file") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} {error}: save it as UTF-8") from error
    budget.bytes -= len(content)
    if budget.bytes < 0:
        raise ConfigError(
            f"{path}: a recipe and all that it extends may hold at most "
            f"{safe_read.format_size(MAX_BYTES)}"
        )
    root, problems = read_text(text, str(path), budget=budget)
    if root.value is None:
        raise ConfigError(
            f"{path} is empty: a recipe needs at least model, algorithm and environment"
        )
    if not root.is_section:
        kind = "a list" if isinstance(root.value, list) else "a single value"
        raise ConfigError(f"{path} must hold keys and values (`model: ...`), not {kind}")
    return root, problems


def _suggest_file(path: Path) -> str:
    """Return a hint, beginning with ": ", for the message that a recipe is missing.

    The hint suggests a similar name here or among Ratchet's recipes, or says that the directory is
    missing too; "" if none applies.
    """
    directory = path.parent
    shipped = (
        f" at this path: `{path.name}`, without a directory, is one that comes with Ratchet"
        if path.name in list_recipes()
        else suggest_recipe(path.stem)
    )
    if not directory.is_dir():
        return shipped or f": there is no directory {directory}"
    try:
        recipes = sorted(
            p.name for p in islice(directory.iterdir(), 1000) if p.suffix in (".yaml", ".yml")
        )
    except OSError:  # no permission to list the directory
        return ""
    file_name = path.name if path.suffix in (".yaml", ".yml") else f"{path.name}.yaml"
    near = difflib.get_close_matches(file_name, recipes, n=1)
    return f": did you mean {directory / near[0]}?" if near else shipped


def write_flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True,
        width=math.inf,
    )
    return text.removesuffix("\n...\n").strip()


def write_text(values: Mapping[str, Any]) -> str:
    """Return YAML that `read_text` reads back to equal values."""
    return yaml.dump(
        dict(values),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=120,
    )
