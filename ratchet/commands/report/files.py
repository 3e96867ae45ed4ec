"""Read a run's recipe and the end of its log for the report page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from ratchet.config.base import Section
from ratchet.config.key_paths import STAGES, find_section, find_slot, get_default
from ratchet.config.registry import KINDS
from ratchet.config.resolve import section_class
from ratchet.config.schema import RunConfig
from ratchet.errors import RatchetError
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.safe_read import read_last_lines, read_text

MAX_LINES = 500  # lines of the log that the page gets
MAX_LINE_CHARS = 2000  # characters of a line that the page gets
# Only the last bytes of the log are read. Long lines may fill them with fewer than MAX_LINES lines.
TAIL_BYTES = 2**18
NO_DEFAULT = object()


def read_files(directory: RunDirectory) -> dict[str, Any]:
    """Return the text of `config.yaml`, its keys that differ from defaults, and the log's end.

    Links are not followed: a run of another user could show any file of this one.
    """
    try:
        if directory.config.is_symlink():
            raise OSError("it is a link")
        config = read_text(directory.config)
        changed = list_changed_keys(directory.read_config())
    except (OSError, ValueError, RatchetError) as error:
        config, changed = f"config.yaml can't be read: {error}", {}
    return {"config": config, "changed": changed, "log": _read_log(directory)}


def _read_log(directory: RunDirectory) -> list[str]:
    """Return the last lines of run.log; [] if there is no run.log."""
    if directory.log.is_symlink():
        return ["run.log is a link, and is not followed"]
    return [
        line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]} …"
        for line in read_last_lines(directory.log, MAX_LINES, max_bytes=TAIL_BYTES)
    ]


def list_changed_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a resolved recipe whose values are not the defaults, by path.

    All keys of a section whose kind is the user's own class are returned, because its defaults are
    unknown: no code of a run is imported.
    """
    return dict(_walk(RunConfig, config, None, ""))


def _walk(
    section: type[Section] | None, values: Mapping[str, Any], default: Section | None, prefix: str
) -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of the keys of a section that are not the defaults.

    Args:
        section: The class of the section; None for a class of the user's own.
        values: The section in the recipe.
        default: The section that the enclosing section has by default, if it is of this kind.
        prefix: The path of the section.
    """
    for name, value in values.items():
        path = f"{prefix}{name}"
        field = None if section is None else section.model_fields.get(name)
        if name == "kind":
            if default is None or default.kind_name != value:
                yield path, value
            continue
        if field is None:
            yield path, value
            continue
        default_value = getattr(default, name) if hasattr(default, name) else _find_default(field)
        slot, inner = find_slot(field), find_section(field.annotation)
        items = value if isinstance(value, list) else [value]
        if (slot is None and inner is None) or not all(isinstance(item, Mapping) for item in items):
            if _is_changed(default_value, value):
                yield path, value
            continue
        for index, item in enumerate(items):
            number = item.get("name", index) if name == STAGES else index
            item_path = f"{path}.{number}" if isinstance(value, list) else path
            inner_class = inner if slot is None else _find_class(slot.name, str(item.get("kind")))
            inner_default = _match_kind(default_value, item)
            yield from _walk(inner_class, item, inner_default, f"{item_path}.")


def _match_kind(default: Any, item: Mapping[str, Any]) -> Section | None:
    """Return the default section if it is of the kind of the recipe's section."""
    is_same = isinstance(default, Section) and default.kind_name == item.get("kind", "")
    return default if is_same else None


def _find_class(slot: str, kind: str) -> type[Section] | None:
    """Return the class of a built-in kind; None for the user's own, whose code isn't imported."""
    return section_class(slot, kind) if kind in KINDS[slot] else None


def _find_default(field: FieldInfo) -> Any:
    """Return a key's default; NO_DEFAULT if there is none."""
    try:
        return get_default(field)
    except LookupError:
        return NO_DEFAULT


def _is_changed(default: Any, value: Any) -> bool:
    """Return True if a plain value is not the default, or if there is no default."""
    if default is NO_DEFAULT:
        return True
    return json.dumps(default, default=str) != json.dumps(value, default=str)
