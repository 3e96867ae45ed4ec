"""Import every example file of NeMo RL, ROLL and verl, and write the outcome into docs/migrate.md:
`python benchmarks/upstream_examples.py NEMO_RL ROLL VERL`, each a checkout of its repository.

A checkout that is no git repository (an unpacked archive) needs its commit behind a colon:
`NEMO_RL:7ea279ab`. `--check` compares the page instead of writing it, and exits 1 if it differs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ratchet.commands.migrate.importer import ImportResult, Item, UnconvertedTask, read_config
from ratchet.errors import ConfigError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "migrate.md"
BEGIN, END = "<!-- upstream -->\n", "<!-- /upstream -->"
OUTCOMES = ("converted", "with losses", "needs a value", "refused", "no recipe")
EXAMPLES = {"NeMo RL": "*.y*ml", "ROLL": "*.y*ml", "verl": "*.sh"}  # file names by library
# Why a file holds no training run: a pattern of its path, and the kind of file.
OTHER_FILES = (
    (r"/evals/", "an evaluation (`ratchet eval`)"),
    (r"/config/\w*envs", "environments that other files include"),
    (r"/quant_configs/", "the quantization of a checkpoint"),
    (r"/prefetch_", "servers to download"),
    (r"/ft_launcher/", "settings of a launcher"),
    (r"/cluster|/docker|launch", "settings of a cluster"),
    (r"/generation/", "answers without training"),
    (r"/run_qwen30b_sapo", "a script whose values come from `eval`"),
)
MAX_NOTE_CHARS = 200


@dataclass
class Survey:
    """The outcomes of one repository's files.

    Attributes:
        title: The library's name.
        commit: The commit of the checkout.
        outcomes: Outcome by path in the repository.
        tasks: Files by the sentences that refuse their tasks.
        losses: Files by the note on keys without counterpart.
        loss_keys: Keys by that note.
        others: Files without a recipe, by their kind.
    """

    title: str
    commit: str
    outcomes: dict[str, str] = field(default_factory=dict)
    tasks: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    losses: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    loss_keys: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    others: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, path: Path) -> None:
        """Import one file."""
        try:
            result = read_config(path)
        except UnconvertedTask as error:
            self.outcomes[name] = "refused"
            sentences = str(error).removeprefix(f"{path}: ").partition(" To convert its other")[0]
            self.tasks[_normalise(sentences)].append(name)
            return
        except ConfigError as error:
            self.outcomes[name] = "no recipe"
            self.others[_describe_other(name, str(error))] += 1
            return
        losses = list(_find_losses(result))
        for item in losses:
            note = _normalise(item.note)
            self.losses[note].add(name)
            self.loss_keys[note].add(
                re.sub(r"^(grpo|ppo|dpo|sft|rm|distillation)\.", "", item.peer_key)
            )
        if result.problems:
            self.outcomes[name] = "needs a value"
        else:
            self.outcomes[name] = "with losses" if losses else "converted"


def _find_losses(result: ImportResult) -> Iterator[Item]:
    """Yield the keys that the file sets, that matter, and that the recipe lacks."""
    return (item for item in result.dropped if not item.is_default)


def _describe_other(name: str, message: str) -> str:
    if message.endswith("is empty"):
        return "an empty file"
    kinds = (kind for pattern, kind in OTHER_FILES if re.search(pattern, f"/{name}"))
    kind = next(kinds, None)
    if kind is None:
        raise SystemExit(f"{name}: neither a recipe nor a known other file: {message}")
    return kind


def _normalise(note: str) -> str:
    """Return a note without the values that differ between files."""
    note = re.sub(r"(\w[\w.*]*)=\S+ was converted without it", r"\1 was converted without it", note)
    note = re.sub(r"--data \S+ --model [^\s`]+", "--data FILE --model MODEL", note)
    note = re.sub(r"was left out: .*", "was left out, as `ratchet check` refuses it", note)
    note = " ".join(note.split())
    return note if len(note) <= MAX_NOTE_CHARS else f"{note[: MAX_NOTE_CHARS - 3]}..."


def survey(title: str, argument: str) -> Survey:
    """Import all example files of a checkout."""
    place, _, commit = argument.partition(":")
    root = Path(place)
    if not (root / "examples").is_dir():
        raise SystemExit(f"{root} has no examples/: give a checkout of {title}")
    if not commit:
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    result = Survey(title, commit)
    for path in sorted((root / "examples").rglob(EXAMPLES[title])):
        result.add(path.relative_to(root).as_posix(), path)
    return result


def _write_counts(surveys: list[Survey]) -> Iterator[str]:
    yield "| | Commit | Files | " + " | ".join(OUTCOMES) + " |"
    yield "|---" * (3 + len(OUTCOMES)) + "|"
    for peer in surveys:
        counts = Counter(peer.outcomes.values())
        numbers = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
        yield f"| {peer.title} | `{peer.commit[:10]}` | {len(peer.outcomes)} | {numbers} |"


def _write_folders(peer: Survey) -> Iterator[str]:
    yield f"#### {peer.title}, by folder"
    yield ""
    yield "| Folder | " + " | ".join(OUTCOMES) + " |"
    yield "|---" * (1 + len(OUTCOMES)) + "|"
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for name, outcome in peer.outcomes.items():
        folders[name.rpartition("/")[0]][outcome] += 1
    for folder, counts in sorted(folders.items()):
        numbers = " | ".join(str(counts[outcome] or "") for outcome in OUTCOMES)
        yield f"| `{folder.removeprefix('examples/')}` | {numbers} |"


def _write_lists(peer: Survey) -> Iterator[str]:
    yield f"#### {peer.title}: refused tasks"
    yield ""
    yield "| Files | The run, and what it needs | For example |"
    yield "|---|---|---|"
    for sentences, names in sorted(peer.tasks.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        yield f"| {len(names)} | {_escape(sentences)} | `{names[0].rpartition('/')[2]}` |"
    yield ""
    yield f"#### {peer.title}: losses of converted files"
    yield ""
    yield "| Files | Keys | What becomes of them |"
    yield "|---|---|---|"
    for note, names in sorted(peer.losses.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        keys = sorted(peer.loss_keys[note])
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        yield (
            f"| {len(names)} | {', '.join(f'`{key}`' for key in keys[:3])}{more} | {_escape(note)} |"
        )
    yield ""
    kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(peer.others.items()))
    yield f"Without a recipe: {kinds or 'none'}."


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def write_section(surveys: list[Survey]) -> str:
    """Return the generated part of the page."""
    lines = [
        *_write_counts(surveys),
        "",
        *(line for peer in surveys for line in (*_write_folders(peer), "")),
        *(line for peer in surveys for line in (*_write_lists(peer), "")),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for title in EXAMPLES:
        name = title.lower().replace(" ", "_")
        parser.add_argument(
            name, help=f"a checkout of {title}, with :COMMIT if it is no repository"
        )
    parser.add_argument("--check", action="store_true", help="compare the page, do not write it")
    options = parser.parse_args()
    arguments = (options.nemo_rl, options.roll, options.verl)
    surveys = [survey(*pair) for pair in zip(EXAMPLES, arguments, strict=True)]
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    page = f"{before}{BEGIN}{write_section(surveys)}{END}{rest.partition(END)[2]}"
    for peer in surveys:
        print(peer.title, peer.commit[:10], dict(Counter(peer.outcomes.values())))
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
    elif page != text:
        sys.exit(f"{PAGE} differs: write it anew without --check")


if __name__ == "__main__":
    main()
