"""The command `ratchet convert`, whose source and target may be addresses of object stores."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

from ratchet.checkpoint.manifest import MANIFEST
from ratchet.commands.convert.command import Say, check_not_merged, convert
from ratchet.config.schema import ModelConfig
from ratchet.errors import CheckpointError, ConfigError
from ratchet.learners.config import MegatronConfig
from ratchet.models.load import copy_companions, find_model, read_model_config
from ratchet.runs.resolve import check_address, fetch_weights
from ratchet.training.saved_weights import (
    export_checkpoint,
    find_saved,
    load_recipe,
    use_start_copy,
)
from ratchet.utils.atomic_files import write_json
from ratchet.utils.object_store import (
    Store,
    expand_home,
    get_cached_path,
    is_address,
    put_directory,
    remove_cached_copy,
)

LAST_FILE = "config.json"  # uploaded last: a directory without it is not taken for a model
# File of an exported checkpoint with the checkpoint's identity. Directories without it are not
# removed.
MARKER = ".checkpoint"


def convert_paths_or_addresses(
    source: str,
    target: str,
    *,
    to: str,
    config: str | None,
    verify: bool,
    say: Say,
    adapter: str | None = None,
) -> None:
    """Convert a model with `convert`, from and to local paths or addresses.

    If the target is an address, the model is converted into the cache and stays there until its
    upload is complete. If the upload fails, the same command repeats only the upload, unless the
    source has changed since.
    """
    is_remote = is_address(target)
    if is_remote:
        check_address(target)
        inputs = [_stamp_files(place) for place in (source, config, adapter) if place is not None]
        output = get_cached_path("converted", f"{source}|{to}|{config}|{adapter}|{inputs}|{target}")
        _require_free_target(target, output)
    else:
        output = Path(target)
    if not (is_remote and output.exists()):
        output.parent.mkdir(parents=True, exist_ok=True)
        export_dir = output.absolute().with_name(f".{output.name}.source")
        adapter_dir = _get_local_path(adapter)
        local_source, config = _read_source(source, config, export_dir, say, adapter_dir)
        convert(
            local_source,
            output,
            to=to,
            config=_get_local_path(config),
            verify=verify,
            say=say,
            adapter=adapter_dir,
        )
        if (export_dir / MARKER).is_file():
            shutil.rmtree(export_dir, ignore_errors=True)
    if not is_remote:
        return
    _require_free_target(target, output)  # another process may have filled it meanwhile
    try:
        put_directory(output, target, last=LAST_FILE)
    except OSError as error:
        raise CheckpointError(
            f"{error}; the converted model is in {output}: repeat the command to upload it"
        ) from error
    remove_cached_copy(output)
    say(f"{output.name} is at {target}")


def _stamp_files(place: str) -> list[tuple[str, int, int]]:
    """Return the sizes and times of the files of a local model; [] for an address or a Hub id."""
    if is_address(place):
        return []
    saved = find_saved(place.removesuffix("/policy"))
    directory = expand_home(place) if saved is None else saved.path
    stats = ((str(path), path.stat()) for path in sorted(directory.rglob("*")) if path.is_file())
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _read_source(
    source: str, config: str | None, export_dir: Path, say: Say, adapter: Path | None
) -> tuple[str, str | None]:
    """Return the local path or hub id of the source, and the `config` to convert it with.

    A run's checkpoint is first exported in Hugging Face's format, and an interrupted conversion
    continues from the same export. A checkpoint with Megatron's weights is converted as it is;
    without `config` it gets the config.json of the model that the run started from.

    Args:
        source: The model to convert: a path, an address, or a hub id.
        config: The directory or address of a config.json, or None.
        export_dir: The directory that a checkpoint is exported to.
        say: A function that prints a line.
        adapter: The adapter that will be merged into the model, or None.

    Raises ConfigError if a checkpoint has the adapter merged already.
    """
    # Without --config, CHECKPOINT/policy is treated like CHECKPOINT. With it, the files in that
    # folder are converted directly.
    saved = find_saved(source.removesuffix("/policy") if config is None else source)
    if saved is None or saved.step is None:
        return (str(fetch_weights(source)) if is_address(source) else source), config
    checkpoint = saved.load()
    recipe = load_recipe(saved.run, checkpoint)
    if adapter is not None and recipe.stages[-1].lora is not None:
        check_not_merged(source, saved.run, adapter)
    megatron = saved.path / "policy" / "megatron"
    if isinstance(recipe.stages[-1].learner, MegatronConfig) and megatron.is_dir():
        return str(megatron), config or _find_start_config(
            use_start_copy(recipe, saved.run).model, export_dir
        )
    manifest_digest = sha256((saved.path / MANIFEST).read_bytes()).hexdigest()
    checkpoint_identity = f"{saved.path.resolve()}\n{manifest_digest}\n"
    marker = export_dir / MARKER
    if not marker.is_file() or marker.read_text(encoding="utf-8") != checkpoint_identity:
        _make_empty(export_dir)
        export_checkpoint(saved, export_dir)
        marker.write_text(checkpoint_identity, encoding="utf-8")
    say(f"step {saved.step} of {saved.run}")
    return str(export_dir), config


def _make_empty(export_dir: Path) -> None:
    """Make the directory of an export anew, with an empty marker: the export is not complete.

    Raises ConfigError if the place holds anything that no conversion has left there.
    """
    if export_dir.is_symlink() or (export_dir.exists() and not (export_dir / MARKER).is_file()):
        raise ConfigError(
            f"{export_dir} is needed for this conversion, and holds other files: move them away"
        )
    shutil.rmtree(export_dir, ignore_errors=True)
    export_dir.mkdir(parents=True)
    (export_dir / MARKER).touch()


def _find_start_config(start: ModelConfig, export_dir: Path) -> str | None:
    """Return the directory of a run's start model with its config.json; None for a preset.

    A config.json that the recipe's `model.overrides` change is written to `export_dir`.
    """
    if start.path is None:
        return None
    directory = find_model(start.path, revision=start.revision)
    if not start.overrides:
        return str(directory)
    _make_empty(export_dir)
    copy_companions(directory, export_dir)
    config = read_model_config(
        directory,
        start.overrides,
        backend=start.backend,
        trust_remote_code=start.trust_remote_code,
    )
    write_json(export_dir / "config.json", config)
    return str(export_dir)


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


def _get_local_path(path_or_address: str | None) -> Path | None:
    if path_or_address is None:
        return None
    return fetch_weights(path_or_address) if is_address(path_or_address) else Path(path_or_address)
