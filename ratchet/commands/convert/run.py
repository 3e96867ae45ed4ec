"""The command `ratchet convert`, whose source and target may be addresses of object stores."""

from __future__ import annotations

from pathlib import Path

from ratchet.commands.convert.command import Say, convert
from ratchet.errors import CheckpointError, ConfigError
from ratchet.runs.resolve import check_address, fetch_weights
from ratchet.utils.object_store import (
    Store,
    get_cached_path,
    is_address,
    put_directory,
    remove_cached_copy,
)

LAST = "config.json"  # sent last: without it, a directory is not taken for a model


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
    """Convert a model like `convert`, from and to local paths or addresses.

    The output for an address is built in the cache and stays there until its upload is complete, so
    the same command can retry.
    """
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
    remove_cached_copy(output)
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
