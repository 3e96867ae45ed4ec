"""`ratchet convert` where any of its places may be an address."""

from __future__ import annotations

from pathlib import Path

from ratchet.commands.convert.command import Say, convert
from ratchet.errors import CheckpointError, ConfigError
from ratchet.runs.resolve import check_address, weights_of
from ratchet.utils.object_store import Store, cached, forget, is_address, put_directory

LAST = "config.json"  # nothing is taken for a model without it


def convert_places(
    source: str,
    target: str,
    *,
    to: str,
    config: str | None,
    verify: bool,
    say: Say,
    adapter: str | None = None,
) -> None:
    """As `convert`. What goes to an address is made in the cache first, and stays there until all
    of it has arrived: the same command tries again."""
    away = is_address(target)
    if away:
        check_address(target)
        made = cached("converted", f"{source}|{to}|{config}|{adapter}|{target}")
        _expect_room(target, made)
    else:
        made = Path(target)
    found = str(weights_of(source)) if is_address(source) else source
    if not (away and made.exists()):
        made.parent.mkdir(parents=True, exist_ok=True)
        convert(
            found, made, to=to, config=_here(config), verify=verify, say=say, adapter=_here(adapter)
        )
    if not away:
        return
    try:
        put_directory(made, target, last=LAST)
    except OSError as error:
        raise CheckpointError(
            f"{error}; what was converted lies in {made}: the same command tries again"
        ) from error
    forget(made)
    say(f"{made.name} is at {target}")


def _expect_room(target: str, made: Path) -> None:
    try:
        names = Store(target).entries().keys()
    except OSError as error:
        raise ConfigError(f"{target} can't be read: {error}") from error
    ours = made.exists() and all((made / name).is_file() for name in names) and LAST not in names
    if names and not ours:
        raise ConfigError(f"{target} holds files: give another place, or delete them first")


def _here(place: str | None) -> Path | None:
    if place is None:
        return None
    return weights_of(place) if is_address(place) else Path(place)
