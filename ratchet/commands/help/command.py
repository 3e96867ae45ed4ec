"""`ratchet help`: explain a key, a section or a kind of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from ratchet.commands.help.entries import KeyEntry, list_entries, summarize
from ratchet.config.peer_names import PEER_NAMES
from ratchet.config.registry import KINDS
from ratchet.config.resolve import section_class
from ratchet.errors import ConfigError

MAX_KINDS = 5  # maximum number of an entry's kinds that are listed by name


def make_help_text(words: str = "") -> str:
    """Return what `ratchet help WORDS` prints.

    WORDS is a key, the end of its path, a section, a kind, the key's name in another library, or
    words of its description. The first of these that matches is shown. Without WORDS, the keys at
    the top of a recipe are shown.

    Raises:
        ConfigError: Nothing matches.
    """
    entries = list_entries()
    if not words:
        return _list_top(entries)
    for pages in (
        _explain_path(words, entries),
        _explain_kind(words, entries),
        _explain_peer_name(words, entries),
        _explain_mentions(words, entries),
    ):
        if pages:
            return "\n\n".join(pages)
    names = {entry.name for entry in entries} | {kind for kinds in KINDS.values() for kind in kinds}
    close_names = get_close_matches(words, names, n=3)
    hint = f" Did you mean {' or '.join(close_names)}?" if close_names else ""
    raise ConfigError(f"no key, section or kind is called '{words}'.{hint}")


def _list_top(entries: Sequence[KeyEntry]) -> str:
    top_entries = [entry for entry in entries if "." not in entry.path]
    width = max(len(entry.path) for entry in top_entries) + 2
    return "\n".join(
        [
            *(f"{entry.path:<{width}}{entry.description}" for entry in top_entries),
            "",
            "ratchet help KEY shows one key, section or kind: ratchet help optimizer.lr",
        ]
    )


def _explain_path(path: str, entries: Sequence[KeyEntry]) -> list[str]:
    """Explain the key at a path, with the keys directly below it if it is a section."""
    exact_matches = [entry for entry in entries if entry.path == path]
    matches = exact_matches or [entry for entry in entries if entry.path.endswith(f".{path}")]
    matches = sorted(matches, key=lambda entry: entry.path.count("."))
    pages = [_describe(entry) for entry in matches]
    if len({entry.path for entry in matches}) == 1:
        inner_entries = [
            inner_entry
            for inner_entry in entries
            if inner_entry.path.rpartition(".")[0] == matches[0].path
        ]
        kinds = list(dict.fromkeys(kind for entry in inner_entries for kind in entry.kinds))
        if kinds and not matches[0].kinds:
            pages.append(f"Kinds: {', '.join(kinds)}\nratchet help KIND shows the keys of one.")
        else:
            pages += [_describe(entry) for entry in inner_entries]
    return pages


def _explain_kind(kind: str, entries: Sequence[KeyEntry]) -> list[str]:
    slots = [slot for slot, kinds in KINDS.items() if kind in kinds]
    if not slots:
        return []
    title = f"{slots[0]}: {{kind: {kind}}}\n    {summarize(section_class(slots[0], kind))}"
    # An algorithm and its loss may have the same name (ppo): show the keys of the first slot.
    keys = [entry for entry in entries if kind in entry.kinds]
    depth = min((entry.path.count(".") for entry in keys), default=0)
    return [title, *(_describe(entry, "") for entry in keys if entry.path.count(".") == depth)]


def _explain_peer_name(name: str, entries: Sequence[KeyEntry]) -> list[str]:
    paths = PEER_NAMES.get(name.rpartition(".")[2], ())
    pages = [_describe(entry) for entry in entries if entry.path in paths]
    return [f"In a recipe, {name} of other libraries is:", *pages] if pages else []


def _explain_mentions(words: str, entries: Sequence[KeyEntry]) -> list[str]:
    searched_words = words.lower().split()
    pages = [
        _describe(entry)
        for entry in entries
        if all(word in f"{entry.path} {entry.description}".lower() for word in searched_words)
    ]
    return [f"Keys that mention '{words}':", *pages] if pages else []


def _describe(entry: KeyEntry, kinds: str | None = None) -> str:
    kinds = _list_kinds(entry.kinds) if kinds is None else kinds
    default = f"; default: {entry.default}" if entry.default else ""
    lines = [f"{entry.path}{kinds}", f"    {entry.values}{default}", f"    {entry.description}"]
    return "\n".join(line for line in lines if line.strip())


def _list_kinds(kinds: Sequence[str]) -> str:
    if not kinds:
        return ""
    omission = f" and {len(kinds) - MAX_KINDS} more" if len(kinds) > MAX_KINDS + 1 else ""
    shown_kinds = kinds[:MAX_KINDS] if omission else kinds
    return f"  (kind: {', '.join(shown_kinds)}{omission})"
