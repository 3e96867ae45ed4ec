"""Which keys a peer's newest files have: `python tests/commands/migrate/facts.py PEER CHECKOUT`.

It reads every example of a checkout (TRL: of an unpacked wheel) and writes keys/PEER.json beside
this file: for each method the keys as a tree, each with a neutral value of its type, and nothing
else of the files. Then it prints what `ratchet import` makes of every file.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ratchet.commands.migrate.importer import PEERS, read_config
from ratchet.commands.migrate.read_config import read_source
from ratchet.errors import ConfigError

KEYS = Path(__file__).parent / "keys"
GLOBS = {
    "nemo-rl": ("examples/**/*.yaml", "examples/**/*.yml"),
    "verl": ("verl/trainer/config/**/*.yaml", "examples/**/*.sh", "recipe/**/*.sh"),
    "roll": ("examples/**/*.yaml",),
}
CLASSES = {
    "GRPOConfig": "grpo_config",
    "DPOConfig": "dpo_config",
    "SFTConfig": "sft_config",
    "RewardConfig": "reward_config",
    "KTOConfig": "kto_config",
    "RLOOConfig": "rloo_config",
}
BESIDE = (
    ("trl/trainer/base_config.py", "_BaseConfig"),
    ("trl/trainer/model_config.py", "ModelConfig"),
    ("trl/scripts/utils.py", "ScriptArguments"),
)
WORD = re.compile(r"[A-Za-z][\w.-]{0,23}")
NEUTRAL = {"bool": True, "int": 2, "float": 0.5, "str": "text", "list": [2], "null": None}


def neutral(values: list[Any]) -> Any:
    """Return a value of the commonest type: for text a plain word that files use, if one does."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    kind = Counter(type(value).__name__ for value in values).most_common(1)[0][0]
    words = [
        value
        for value in values
        if isinstance(value, str) and WORD.fullmatch(value) and "." not in value
    ]
    if kind == "str" and words:
        return Counter(words).most_common(1)[0][0]
    return NEUTRAL.get(kind, "text")


def tree(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as sections; a key that is a value here and a section there is written
    with dots."""
    nested: dict[str, Any] = {}
    for key in sorted(keys):
        *places, last = key.split(".")
        section: Any = nested
        for place in places:
            section = section.setdefault(place, {}) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section[last] = keys[key]
        else:
            nested[key] = keys[key]
    return nested


def flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a tree."""
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def of_files(peer: str, checkout: Path) -> tuple[dict[str, dict[str, Any]], Counter[str]]:
    """Return keys by method, and totals over the files."""
    values: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    totals: Counter[str] = Counter()
    for path in sorted(path for glob in GLOBS[peer] for path in checkout.glob(glob)):
        totals["files"] += 1
        try:
            source = read_source(path)
            method = PEERS[peer].detect_method(source.values)
            totals["of no method"] += not method
            if not method:
                continue
            result = read_config(path, peer)
        except ConfigError as error:
            totals["not read"] += 1
            sys.stdout.write(f"  not read: {str(error).replace(str(checkout), '')}\n")
            continue
        for key, value in source.values.items():
            values[method][key].append(value)
        totals.update(item.status for item in result.items if not item.is_default)
        totals["null"] += len(result.null_keys)
        totals["unresolved"] += len(result.unresolved)
        totals["not in the table"] += sum(
            "is not in the table" in item.note for item in result.items
        )
        totals["keys"] += len(source.values) + len(result.unresolved)
    return {
        method: {key: neutral(several) for key, several in keys.items()}
        for method, keys in values.items()
    }, totals


def of_trl(wheel: Path) -> dict[str, dict[str, Any]]:
    """Return fields of TRL's dataclasses, read and not run, and of transformers'
    TrainingArguments."""
    from transformers import TrainingArguments

    common = {name: field.default for name, field in TrainingArguments.__dataclass_fields__.items()}
    common = {
        name: value if isinstance(value, bool | int | float | str) else None
        for name, value in common.items()
    }
    for file, name in BESIDE:
        common |= fields(wheel / file, name)
    return {
        name: {
            key: neutral([value])
            for key, value in (common | fields(wheel / f"trl/trainer/{file}.py", name)).items()
        }
        for name, file in CLASSES.items()
    }


def fields(file: Path, name: str) -> dict[str, Any]:
    """Return annotated fields of a dataclass with their defaults, where those are literals."""
    classes = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    content: dict[str, Any] = {}
    for node in classes[0].body if classes else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            content[node.target.id] = default(node)
    return content


def default(node: ast.AnnAssign) -> Any:
    """Return the default of a field, else a value of the type that its annotation begins with;
    None: neither is plain."""
    value = node.value
    if isinstance(value, ast.Call):
        value = next((word.value for word in value.keywords if word.arg == "default"), None)
    if isinstance(value, ast.Constant) and value.value is not None:
        return value.value
    word = re.match(r"\w+", ast.unparse(node.annotation))
    return NEUTRAL.get(word[0]) if word else None


def main() -> None:
    """Write the keys of one peer, and print totals."""
    peer, checkout = sys.argv[1], Path(sys.argv[2])
    keys, totals = (of_trl(checkout), Counter()) if peer == "trl" else of_files(peer, checkout)
    KEYS.mkdir(exist_ok=True)
    text = json.dumps(
        {method: tree(content) for method, content in sorted(keys.items())}, separators=(",", ":")
    )
    (KEYS / f"{peer}.json").write_text(text + "\n")
    sys.stdout.write(
        f"{peer} { ({method: len(content) for method, content in keys.items()}) } {dict(totals)}\n"
    )


if __name__ == "__main__":
    main()
