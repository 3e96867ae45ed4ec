"""Read YAML and JSON files as other libraries do, within bounds. Every error is a ConfigError.

Recipes are YAML 1.2, but these libraries read other dialects: PyYAML reads YAML 1.1 (`yes` is
true, 010 is 8, 1_000 is a number, 1e-6 is text). OmegaConf also reads floats without a point (1e-6)
or without a sign of the exponent (1.0e6). So PyYAML's resolvers are used to read values.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ratchet.config.yaml_tree import read_yaml_error
from ratchet.errors import ConfigError

Dialect = Literal["omegaconf", "yaml"]
# Limit of values of all files together. An alias counts at each use, so that nested anchors can't
# multiply the values.
MAX_VALUES = 20_000
MAX_FILES = 200
# Limits of each file.
MAX_DEPTH = 64
MAX_BYTES = 2 * 1024 * 1024
TOO_MANY = f"has more than {MAX_VALUES:,} values (aliases count at each use), the limit"
TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep, the limit"
COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
FLOAT = "tag:yaml.org,2002:float"


class _Yaml(yaml.SafeLoader):
    """A loader of YAML 1.1 without dates, because no key of these libraries has a date.

    It checks the bounds while it composes, because PyYAML takes seconds for deeply nested brackets
    and minutes for a million values.
    """

    n_nodes = 0
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node and its content. Raises ConfigError beyond the bounds."""
        location = f"line {self.peek_event().start_mark.line + 1}"
        self.n_nodes += 1
        self.depth += 1
        if self.n_nodes > MAX_VALUES:
            raise ConfigError(f"{location}: {TOO_MANY}")
        if self.depth > MAX_DEPTH:
            raise ConfigError(f"{location}: {TOO_DEEP}")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Yaml.yaml_implicit_resolvers = {
    start: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _OmegaConf(_Yaml):
    """A loader that reads floats as OmegaConf does (omegaconf.readthedocs.io)."""


_OmegaConf.add_implicit_resolver(
    FLOAT,
    re.compile(r"[-+]?\d+(?:_\d+)*(?:\.[\d_]*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)\Z", re.ASCII),
    list("-+0123456789"),
)
LOADERS: dict[Dialect, type[yaml.SafeLoader]] = {"omegaconf": _OmegaConf, "yaml": _Yaml}


@dataclass
class ConfigReader:
    """A reader of the files of one configuration, which counts their values and files together."""

    dialect: Dialect
    n_values: int = 0
    n_files: int = 0
    _ancestors: set[int] = field(default_factory=set)  # ids of the nodes around the one being read

    def read_yaml(self, path: Path, *, may_be_empty: bool = False) -> dict[str, Any]:
        """Return the keys and values of a YAML file. Raises ConfigError."""
        try:
            loader: Any = LOADERS[self.dialect](self.read_text(path))
            root = loader.get_single_node()
            content = None if root is None else self._construct(root, loader, path)
        except yaml.YAMLError as error:
            mark, detail = read_yaml_error(error)
            location = path if mark is None else f"{path}:{mark.line + 1}"
            raise ConfigError(f"{location}: is not YAML: {detail}") from error
        except ConfigError as error:
            raise error if str(path) in str(error) else ConfigError(f"{path}, {error}") from error
        if content is None and may_be_empty:
            return {}
        return _require_section(content, path)

    def read_json(self, path: Path) -> dict[str, Any]:
        """Return the keys and values of a JSON file. Raises ConfigError."""
        try:
            content = json.loads(
                self.read_text(path), object_pairs_hook=lambda pairs: _make_unique_dict(pairs, path)
            )
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} can't be read as JSON: {error}") from error
        return _require_section(content, path)

    def read_text(self, path: Path) -> str:
        """Return the text of a file.

        Raises ConfigError if it is missing, too large or not UTF-8, or exceeds the number of files.
        """
        self.n_files += 1
        if self.n_files > MAX_FILES:
            raise ConfigError(f"{path}: `defaults` name more than {MAX_FILES} files, the limit")
        try:
            if not path.is_file():
                raise ConfigError(
                    f"{path} is not a file" if path.exists() else f"there is no file {path}"
                )
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES // 1024**2} MiB, the limit")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8"
            ) from error

    def _construct(self, node: yaml.Node, loader: Any, path: Path) -> Any:
        """Return the value of a parsed node. Raises ConfigError beyond the bounds."""
        location = f"{path}:{node.start_mark.line + 1}"
        self.n_values += 1
        if self.n_values > MAX_VALUES:
            raise ConfigError(f"{location}: {TOO_MANY}")
        if id(node) in self._ancestors:
            raise ConfigError(f"{location}: an anchor contains itself")
        if len(self._ancestors) >= MAX_DEPTH:
            raise ConfigError(f"{location}: {TOO_DEEP}")
        if not isinstance(node, yaml.ScalarNode) and node.tag not in COLLECTIONS:
            raise ConfigError(
                f"{location}: the YAML tag {node.tag.rpartition(':')[2]} is not read here: write "
                "plain text"
            )
        self._ancestors.add(id(node))
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node, loader, path)
        elif isinstance(node, yaml.SequenceNode):
            value = [self._construct(item, loader, path) for item in node.value]
        else:
            value = self._scalar(node, loader, location)
        self._ancestors.discard(id(node))
        return value

    def _scalar(self, node: yaml.Node, loader: Any, location: str) -> Any:
        try:
            value = loader.construct_object(node)
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"{location}: {str(node.value)[:40]!r} can't be read as a value: {error}"
            ) from error
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ConfigError(
                f"{location}: the YAML tag {node.tag.rpartition(':')[2]} is not read here: write "
                "plain text"
            )
        return value

    def _mapping(self, node: yaml.MappingNode, loader: Any, path: Path) -> dict[str, Any]:
        """Return a section. Its own keys take precedence over merged ones (`<<`)."""
        merged: dict[str, Any] = {}
        pairs: list[tuple[str, Any]] = []
        for key, content in node.value:
            if key.tag.endswith(":merge"):
                sections = self._construct(content, loader, path)
                for section in reversed(sections if isinstance(sections, list) else [sections]):
                    if not isinstance(section, dict):
                        raise ConfigError(
                            f"{path}:{key.start_mark.line + 1}: << must name an anchor of a section"
                        )
                    merged |= section
            elif isinstance(key, yaml.ScalarNode):
                pairs.append((str(key.value), self._construct(content, loader, path)))
            else:
                raise ConfigError(f"{path}:{key.start_mark.line + 1}: a key must be a word")
        return merged | _make_unique_dict(pairs, path)


def _make_unique_dict(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ConfigError(f"{path}: {key} is set twice in one section: remove one of them")
        content[key] = value
    return content


def _require_section(content: Any, path: Path) -> dict[str, Any]:
    if content is None:
        raise ConfigError(f"{path} is empty")
    if not isinstance(content, dict):
        description = "a list" if isinstance(content, list) else f"just {str(content)[:40]!r}"
        raise ConfigError(f"{path} must hold keys and values, not {description}")
    return content
