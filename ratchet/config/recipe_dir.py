"""Find the data, models and modules that a recipe names, also in the directory of the recipe.

A relative path that does not exist in the current directory is looked up in the directory of the
file that names it. The same holds for the file in a value `file.py:name`, and for the module in a
value `module:name` that is not on the import path.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ratchet.config.yaml_tree import COMMAND_LINE, Node, ValueOrigin
from ratchet.utils.object_store import is_address
from ratchet.utils.user_imports import FILE_OBJECT

IMPORT_DIRS = "import_dirs"
# The keys whose values are paths of files that a run reads. In a list or section at such a key, all
# values are.
PATH_KEYS = frozenset(
    {
        "path",
        "train",
        "test",
        "teacher",
        "texts",
        "corpus",
        "embeddings",
        "template",
        "media_root",
        "root",
        "token_file",
        "certificates",
        IMPORT_DIRS,
    }
)
IMPORT_PATH = re.compile(r"([A-Za-z_]\w*)(\.\w+)*:[A-Za-z_]\w*")


def resolve_paths(root: Node, keys: Collection[str]) -> Node:
    """Return a file's tree; paths that exist only in the file's directory are prefixed with it.

    Args:
        root: The tree.
        keys: All top-level keys of a recipe. A file that has them all was saved by a run, and its
            paths are already resolved. Its tree is returned unchanged, because a path such as
            `model` could match one of the run's own files.
    """
    directory = Path(root.origin.file).parent
    if set(keys) <= set(root.value) or directory == Path():
        return root
    return _replace_paths(root, directory, is_path=False)


def _replace_paths(node: Node, directory: Path, *, is_path: bool) -> Node:
    """Return the node with its paths resolved. is_path: True at or below one of PATH_KEYS."""
    if isinstance(node.value, dict):
        return replace(
            node,
            value={
                key: _replace_paths(child, directory, is_path=is_path or key in PATH_KEYS)
                for key, child in node.value.items()
            },
        )
    if isinstance(node.value, list):
        items = [_replace_paths(item, directory, is_path=is_path) for item in node.value]
        return replace(node, value=items)
    path = node.value
    if isinstance(path, str) and (match := FILE_OBJECT.fullmatch(path)):
        file, name = match.groups()
        is_only_in_directory = not os.path.exists(file) and (directory / file).is_file()
        return replace(node, value=f"{directory / file}:{name}") if is_only_in_directory else node
    if not is_path or not isinstance(path, str) or not path or is_address(path):
        return node
    path_in_directory = str(directory / path)
    if _exists(path) or not _exists(path_in_directory):
        return node
    return replace(node, value=path_in_directory)


def _exists(path: str) -> bool:
    """True if the path exists, or matches a file as a pattern."""
    return os.path.exists(path) or (
        "\0" not in path and glob.has_magic(path) and any(glob.iglob(path, recursive=True))
    )


def add_import_dirs(root: Node) -> Node:
    """Return the recipe with all its `import_dirs`, and let Python import from them.

    The directory of a file is added if it holds a module that the file names and that Python does
    not find elsewhere.
    """
    import_dirs = root.get(IMPORT_DIRS) or Node(
        [], ValueOrigin(root.origin.file, None, IMPORT_DIRS)
    )
    items = list(import_dirs.value) if isinstance(import_dirs.value, list) else []
    for item in items:
        if isinstance(item.value, str):
            _append_to_path(item.value)
    for leaf in _list_leaves(root):
        match = IMPORT_PATH.fullmatch(leaf.value) if isinstance(leaf.value, str) else None
        directory = Path(leaf.origin.file).parent
        if match is None or leaf.origin.file == COMMAND_LINE:
            continue
        if _has_module(directory, match[1]) and not _is_importable(match[1]):
            _append_to_path(str(directory))
            items.append(Node(str(directory), leaf.origin))
    if not items:
        return root
    return replace(root, value={**root.value, IMPORT_DIRS: Node(items, import_dirs.origin)})


def _list_leaves(node: Node) -> Iterator[Node]:
    if isinstance(node.value, dict | list):
        children = node.value.values() if isinstance(node.value, dict) else node.value
        for child in children:
            yield from _list_leaves(child)
    else:
        yield node


def _has_module(directory: Path, name: str) -> bool:
    return (directory / f"{name}.py").is_file() or (directory / name).is_dir()


def _is_importable(name: str) -> bool:
    return name in sys.modules or find_spec(name) is not None


def _append_to_path(directory: str) -> None:
    resolved = str(Path(directory).resolve())
    if resolved not in sys.path:
        sys.path.append(resolved)
