"""The command `ratchet convert` for places that may be addresses."""

from __future__ import annotations

from pathlib import Path

from ratchet.commands.convert.command import Say, convert
from ratchet.errors import CheckpointError, ConfigError
from ratchet.runs.resolve import check_address, fetch_weights
from ratchet.utils.object_store import (
    Store,
    forget_cached,
    get_cached_path,
    is_address,
    put_directory,
)

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
    """Convert like `convert`. A target at an address is built in the cache first, and stays there
    until all of it has arrived: the same command tries again."""
    away = is_address(target)
    if away:
        check_address(target)
        output = get_cached_path("converted", f"{source}|{to}|{config}|{adapter}|{target}")
        _expect_room(target, output)
    else:
        output = Path(target)
    local_source = str(fetch_weights(source)) if is_address(source) else source
    if not (away and output.exists()):
        output.parent.mkdir(parents=True, exist_ok=True)
        convert(
            local_source,
            output,
            to=to,
            config=_here(config),
            verify=verify,
            say=say,
            adapter=_here(adapter),
        )
    if not away:
        return
    try:
        put_directory(output, target, last=LAST)
    except OSError as error:
        raise CheckpointError(
            f"{error}; what was converted lies in {output}: the same command tries again"
        ) from error
    forget_cached(output)
    say(f"{output.name} is at {target}")


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
    return fetch_weights(place) if is_address(place) else Path(place)
