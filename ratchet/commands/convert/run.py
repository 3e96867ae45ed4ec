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

LAST_FILE = "config.json"  # uploaded last: a directory without it is not taken for a model


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

    The output for an address is built in the cache, and stays there until its upload is complete.
    If the upload fails, the same command tries again.
    """
    is_remote = is_address(target)
    if is_remote:
        check_address(target)
        output = get_cached_path("converted", f"{source}|{to}|{config}|{adapter}|{target}")
        _require_free_target(target, output)
    else:
        output = Path(target)
    local_source = str(fetch_weights(source)) if is_address(source) else source
    if not (is_remote and output.exists()):
        output.parent.mkdir(parents=True, exist_ok=True)
        convert(
            local_source,
            output,
            to=to,
            config=_get_local_path(config),
            verify=verify,
            say=say,
            adapter=_get_local_path(adapter),
        )
    if not is_remote:
        return
    try:
        put_directory(output, target, last=LAST_FILE)
    except OSError as error:
        raise CheckpointError(
            f"{error}; the converted model is in {output}: repeat the command to upload it"
        ) from error
    remove_cached_copy(output)
    say(f"{output.name} is at {target}")


def _require_free_target(target: str, output: Path) -> None:
    """Raise ConfigError if the target holds files other than those of an interrupted upload."""
    try:
        names = Store(target).entries().keys()
    except OSError as error:
        raise ConfigError(f"{target} can't be read: {error}") from error
    is_interrupted_upload = (
        output.exists()
        and all((output / name).is_file() for name in names)
        and LAST_FILE not in names
    )
    if names and not is_interrupted_upload:
        raise ConfigError(f"{target} holds files: give another place, or delete them first")


def _get_local_path(place: str | None) -> Path | None:
    if place is None:
        return None
    return fetch_weights(place) if is_address(place) else Path(place)
