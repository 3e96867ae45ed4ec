"""The command `ratchet push`: upload a run's model, tokenizer and model card to a Hub.

The package `huggingface_hub` reads the Hub's address from HF_ENDPOINT, and the token from HF_TOKEN
or from the file that `hf auth login` writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from ratchet.commands.push.model_card import PushedModel, make_model_card
from ratchet.data.presets.lookup import find_dataset_preset
from ratchet.errors import ConfigError, RatchetError, RunNotFound
from ratchet.models.lora.files import CONFIG as ADAPTER_CONFIG
from ratchet.models.scalar_head import HEAD_FILE
from ratchet.runs.resolve import fetch_run_model, fetch_run_record
from ratchet.runs.run_dir import ADAPTER, MODEL, RunDirectory
from ratchet.training.saved_weights import SavedWeights, export_checkpoint, find_saved, split_step
from ratchet.utils.object_store import is_address
from ratchet.utils.safe_read import read_json
from ratchet.utils.temp_dirs import TemporaryFolder
from ratchet.utils.terminal_text import shorten_text

CARD = "README.md"
# Files of an earlier push that a loader would read beside or instead of the new ones.
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
RECORD_FILES = ("config.yaml", "metrics.jsonl", "provenance.json")

Say = Callable[[str], None]


def push_run(
    place: str,
    repository: str | None = None,
    *,
    adapter: bool = False,
    private: bool = False,
    say: Say,
) -> None:
    """Upload the model of a run to a Hub. Its records and data stay where they are.

    Args:
        place: The run, or RUN@STEP for one of its checkpoints; a path or an address.
        repository: USER/NAME or NAME, created if it is missing; default: the run's name.
        adapter: True to upload the LoRA adapter instead of the model that it is merged into.
        private: True to create the repository as a private one.
        say: A function that prints a line.

    Raises:
        ConfigError: There is no token, the token may not write to the repository, or its name is
            not allowed.
        RunDirectoryError: There is no run, or it has no model yet.
        RatchetError: The Hub can't be reached, or fails.
    """
    api = HfApi()
    saved = _find_run(place)
    if adapter:
        _require_adapter(saved)
    with _translate_errors(api, repository or "a repository"):
        repository = _choose_name(api, repository, RunDirectory(saved.run))
    with ExitStack() as stack:
        directory = saved.path
        if adapter:
            directory = saved.run / ADAPTER
        elif saved.step is not None:
            directory = stack.enter_context(TemporaryFolder("push")) / MODEL
            export_checkpoint(saved, directory)
        with _translate_errors(api, repository):
            card = make_model_card(_describe_model(api, repository, saved, directory, adapter))
            api.create_repo(repository, private=private or None, exist_ok=True)
            files = _upload(api, repository, directory, card)
    say(f"{api.endpoint}/{repository}")
    say("\n".join(f"  {name}" for name in files))


def _find_run(place: str) -> SavedWeights:
    text, step = split_step(place.rstrip("/"))
    if is_address(text):
        fetch_run_record(text, RECORD_FILES)
        saved = SavedWeights(fetch_run_model(text, step), step)
    else:
        saved = find_saved(place)
    if saved is None:
        raise RunNotFound(
            f"{place} holds no run (no config.yaml): give the directory that `ratchet train` "
            "printed. `hf upload` uploads other directories"
        )
    return saved


def _require_adapter(saved: SavedWeights) -> None:
    if saved.step is not None:
        raise ConfigError(
            f"--adapter is for a finished run, and step {saved.step} is a checkpoint: leave out "
            "--adapter or the step"
        )
    if not (saved.run / ADAPTER / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{saved.run} has no adapter: leave out --adapter")


def _choose_name(api: HfApi, repository: str | None, run: RunDirectory) -> str:
    """Return USER/NAME, after asking the Hub for the user of the token."""
    if not get_token():
        raise ConfigError(
            f"there is no token for {api.endpoint}: set HF_TOKEN to one that may write, or log in "
            "with `hf auth login`"
        )
    if repository is None:
        name = str(run.read_config().get("name") or run.path.absolute().name)
        repository = re.sub(r"[^A-Za-z0-9_.-]+|--+|\.\.+", "-", name).strip("-.")
    user = str(api.whoami()["name"])
    repository = repository if "/" in repository else f"{user}/{repository}"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--to={repository} is not a name of a repository: {error}") from None
    return repository


def _describe_model(
    api: HfApi, repository: str, saved: SavedWeights, directory: Path, adapter: bool
) -> PushedModel:
    """Return the facts of the card that need the Hub: which models and datasets it has.

    Raises ConfigError for an adapter whose base model is not at the Hub.
    """
    recipe = RunDirectory(saved.run).read_config()
    base = recipe["model"]["path"]
    if adapter:
        base = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    is_published = isinstance(base, str) and _is_published(api, base, "model")
    if adapter and not is_published:
        raise ConfigError(
            f"{directory} is an adapter of {base or 'a model of its run'}, which {api.endpoint} "
            "does not have: leave out --adapter, and the merged model is uploaded"
        )
    hub_ids = [_find_dataset(stage["environment"]) for stage in recipe["stages"]]
    return PushedModel(
        repository,
        saved.run,
        saved.step,
        base_model=base if is_published else None,
        datasets=tuple(
            hub_id for hub_id in dict.fromkeys(hub_ids) if hub_id and not Path(hub_id).exists()
        ),
        is_adapter=adapter,
        is_language_model=not (directory / HEAD_FILE).exists(),
    )


def _is_published(api: HfApi, name: str, kind: str) -> bool:
    """True if the Hub has a model of this name, and the name is not a local path or address."""
    if is_address(name) or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return api.repo_exists(name, repo_type=kind)


def _find_dataset(environment: Any) -> str | None:
    """Return the Hub id of an environment's dataset; None if its tasks are from elsewhere."""
    if environment.get("hub"):
        return str(environment["hub"])
    if environment.get("preset") and not environment.get("train"):
        return find_dataset_preset(environment["preset"]).hub
    return None


def _upload(api: HfApi, repository: str, directory: Path, card: str) -> list[str]:
    """Upload a model directory and its card in one commit, and return the names of the files."""
    names = sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.relative_to(directory).as_posix() != CARD
    )
    stale_files = [
        name
        for name in api.list_repo_files(repository)
        if name not in names and any(fnmatch(name, pattern) for pattern in WEIGHT_FILES)
    ]
    api.create_commit(
        repository,
        [
            CommitOperationAdd(CARD, card.encode()),
            *(CommitOperationAdd(name, directory / name) for name in names),
            *(CommitOperationDelete(name) for name in stale_files),
        ],
        commit_message="Upload by ratchet push",
    )
    return [CARD, *names]


@contextmanager
def _translate_errors(api: HfApi, repository: str) -> Iterator[None]:
    """Turn errors of `huggingface_hub` into errors that say what to do."""
    try:
        yield
    except HfHubHTTPError as error:
        reason = shorten_text(error.server_message or str(error).strip().splitlines()[0], 300)
        if error.response.status_code == 401:
            raise ConfigError(
                f"{api.endpoint} does not know the token ({reason}): set HF_TOKEN to a valid one, "
                "or log in with `hf auth login`"
            ) from error
        if error.response.status_code in (403, 404):
            raise ConfigError(
                f"this token may not write to {repository} at {api.endpoint} ({reason}): set --to "
                "to a name of your own, or use a token that may write there"
            ) from error
        raise RatchetError(f"{api.endpoint} failed for {repository}: {reason}") from error
    # `huggingface_hub` raises RuntimeError and ValueError for a failed upload of a large file.
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        reason = shorten_text(str(error) or type(error).__name__, 300)
        raise RatchetError(
            f"{api.endpoint} could not be used ({reason}): check HF_ENDPOINT and the network, and "
            "repeat the command"
        ) from error
