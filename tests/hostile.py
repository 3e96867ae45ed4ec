"""Recipes, data and model directories that are written to hang, to crash or to deceive, for
tests/test_hostile_inputs.py.

Each is made in a folder that the test gives.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
QUICKSTART = (REPOSITORY / "ratchet" / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
PIPE, ZERO, FOLDER = object(), object(), object()  # in place of a file's content


def place(path: Path, content: Any) -> Path:
    """Put bytes, a text, a pipe, a link to /dev/zero or a folder where `path` says."""
    if path.exists() or path.is_symlink():
        path.unlink()
    if content is PIPE:
        os.mkfifo(path)
    elif content is ZERO:
        path.symlink_to("/dev/zero")
    elif content is FOLDER:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def aliases(levels: int = 9) -> str:
    """Return anchors each of which names the one before nine times."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def merges(levels: int = 12) -> str:
    """Return sections each of which merges the one before nine times."""
    lines = ["a0: &a0 {x: 1}"] + [
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, levels)
    ]
    return "\n".join(lines) + "\n"


def _with(key: str, value: str) -> str:
    """Return the quick-start's recipe with another value of a key at its top."""
    text, count = re.subn(rf"(?m)^{key}: .*$", f"{key}: {value}", QUICKSTART)
    assert count == 1
    return text


def _shaped(values: str) -> str:
    return _with("model", f"{{preset: tiny, overrides: {{{values}}}}}")


# name -> (the recipe's text, what its refusal says)
RECIPES: Mapping[str, tuple[str, str]] = {
    "aliases": (
        aliases() + QUICKSTART,
        "anchors and merges expand this recipe to more than 100,000 values",
    ),
    "aliases of a real key": (
        aliases().replace("a8:", "rewards:") + QUICKSTART,
        "anchors and merges expand this recipe to more than",
    ),
    "merges": (
        merges() + QUICKSTART,
        "anchors and merges expand this recipe to more than 100,000 values",
    ),
    "an anchor within itself": (QUICKSTART + "x: &a {b: *a}\n", "an anchor contains itself"),
    "4,000 unknown keys": (
        QUICKSTART + "".join(f"k{n}: 1\n" for n in range(4000)),
        "4,000 problems",
    ),
    "100,000 unknown keys": (
        QUICKSTART + "".join(f"k{n}: 1\n" for n in range(100_000)),
        "it holds more than 512 KiB",
    ),
    "40,000 values": (
        QUICKSTART + f"x: [{'1,' * 40_000}]\n",
        "a recipe holds at most 10,000 keys and values",
    ),
    "6,000 digits": (
        QUICKSTART + f"seed: {'9' * 6000}\n",
        "a whole number of 6,000 digits is too large",
    ),
    "nested 3,000": (QUICKSTART + "x: " + "[" * 3000 + "]" * 3000, "nested more than 64 deep"),
    "nested 20,000": (
        QUICKSTART + "x: " + "{a: " * 20_000 + "}" * 20_000,
        "nested more than 64 deep",
    ),
    "nested blocks": (QUICKSTART + "x:\n  " + "- " * 5000 + "1\n", "nested more than 64 deep"),
    "nested by anchors": (
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 500)) + QUICKSTART,
        "nested more than 64 deep",
    ),
    "a long key": (QUICKSTART + f"{'k' * 900}: 1\n", "a key has 900 characters"),
    "a key set twice": (QUICKSTART + "seed: 1\nseed: 2\n", "is set twice"),
    "a tag": (QUICKSTART + "name: !!python/name:os.system\n", "tag"),
    "a number by tag": (QUICKSTART + "x: !!int abc\n", "is not a whole number"),
    "extends /dev/zero": ("extends: /dev/zero\n", "it is a device, and must be a plain file"),
    "extends a folder": ("extends: /tmp\n", "is a directory"),
    "extends /etc/passwd": ("extends: /etc/passwd\n", "must hold keys and values"),
    "extends no name": ('extends: "a\\0b"\n', "can't be read"),
    "extends a number": ("extends: 5\n", "extends must be the path of one recipe"),
    "a kind by a path of files": (
        _with("environment", "{kind: '../../x:Y'}"),
        "is not the path of a class",
    ),
    "a kind without a module": (_with("environment", "{kind: ':Y'}"), "is not the path of a class"),
    "a class that is not an environment": (
        _with("environment", "{kind: 'queue:Queue'}"),
        "is not an environment",
    ),
    "a vocabulary below 0": (
        _shaped("vocab_size: -5"),
        "vocab_size=-5 must be a whole number from 1",
    ),
    "no heads": (_shaped("n_heads: 0"), "n_heads=0 must be a whole number from 1"),
    "a width of 2^40": (_shaped(f"hidden_size: {2**40}"), "must be a whole number from 1"),
    "10^9 layers": (_shaped("n_layers: 1000000000"), "must be a whole number from 1"),
    "a list for a number": (_shaped("rope: [1]"), "must be a section with rope_type"),
    "3,000 stages": ("stages:\n" + "- {name: a}\n" * 3000 + QUICKSTART, "is set twice"),
    "no YAML": ("a:\t1\n\tb: 2\n", "is not YAML"),
    "bytes": ("name: \x00\n", "is not YAML"),
    "a list": ("- 1\n", "must hold keys and values"),
    "empty": ("", "is empty"),
}

ROW = '{"prompt": "q", "answer": "7"}\n'
# name of the file -> (content, what its refusal says)
DATA: Mapping[str, tuple[Any, str]] = {
    "pipe.jsonl": (PIPE, "it is a pipe, and must be a plain file"),
    "zero.jsonl": (ZERO, "it is a device, and must be a plain file"),
    "pipe.parquet": (PIPE, "it is a pipe, and must be a plain file"),
    "zero.csv": (ZERO, "it is a device, and must be a plain file"),
    "pipe.json": (PIPE, "it is a pipe, and must be a plain file"),
    "deep.jsonl": ("[" * 100_000, "nested more than 100 deep"),
    "deep.json": ("[" * 100_000, "nested more than 100 deep"),
    "deep_messages.jsonl": (
        json.dumps({"messages": "x"})[:-4] + "[" * 5000 + "}",
        "nested more than 100 deep",
    ),
    "digits.jsonl": ('{"prompt": "q", "answer": ' + "9" * 6000 + "}", "malformed JSON"),
    "repeated.jsonl": (
        "{" + "".join(f'"k{n}": 1, ' for n in range(20_000)) + '"k0": 1}',
        "key 'k0' appears twice",
    ),
    "wide.csv": (
        ",".join(f"c{n}" for n in range(20_000)) + ",c0\n" + "1," * 20_000 + "1\n",
        "two columns are called 'c0'",
    ),
    "columns.jsonl": ("{" + ", ".join(f'"k{n}": 1' for n in range(20_000)) + "}", "no column"),
    "bomb.jsonl.gz": (None, "it unpacks to more than 200 times its size"),
    "cut.jsonl.gz": (gzip.compress(ROW.encode() * 100)[:-20], "can't be read"),
    "none.parquet": (b"PAR1" + b"\xff" * 100 + b"PAR1", "not a valid Parquet file"),
    "bomb.parquet": (None, "so they are repetitions"),
    "none.arrow": (b"ARROW1\0\0" + b"\xff" * 100, "not a valid Arrow file"),
    "latin.jsonl": (b'{"prompt": "caf\xe9"}', "not UTF-8"),
}


def write_bomb(path: Path) -> Path:
    """Write a gzip or a Parquet file that stands for far more than it holds."""
    if path.suffix == ".gz":
        with gzip.open(path, "wb", compresslevel=9) as file:
            for _ in range(65):
                file.write(b" " * (1 << 20))
        return path
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 2_000_000
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["q"])
    pq.write_table(pa.table({"prompt": column, "answer": column}), path)
    return path


def _header(header: Any) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content


# name -> (file of the directory, content or changes to its config.json)
MODELS: Mapping[str, tuple[str, Any]] = {
    **{
        f"config.json: {key}={value!r:.20}": ("config.json", {key: value})
        for key, value in {
            "hidden_size": 2**40,
            "num_hidden_layers": 10**9,
            "vocab_size": -5,
            "num_attention_heads": 0,
            "num_key_value_heads": "x",
            "rope_scaling": 5,
            "layer_types": 3,
            "max_position_embeddings": [1],
            "eos_token_id": {"a": 1},
        }.items()
    },
    "config.json: a list": ("config.json", "[1]"),
    "config.json: deep": ("config.json", "[" * 100_000),
    "config.json: digits": ("config.json", '{"a": ' + "9" * 6000 + "}"),
    "config.json: a pipe": ("config.json", PIPE),
    "config.json: /dev/zero": ("config.json", ZERO),
    "config.json: not UTF-8": ("config.json", b"\xff\xfe\x00"),
    "weights: a pipe": ("model.safetensors", PIPE),
    "weights: a folder": ("model.safetensors", FOLDER),
    "weights: a header of 2^62 bytes": ("model.safetensors", struct.pack("<Q", 2**62)),
    "weights: a shape below 0": (
        "model.safetensors",
        _header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
    ),
    "weights: a deep header": ("model.safetensors", _header(b"[" * 100_000)),
    "index: outside": (
        "model.safetensors.index.json",
        '{"weight_map": {"a": "../../../etc/passwd"}}',
    ),
    "index: no names": ("model.safetensors.index.json", '{"weight_map": {"a": 7}}'),
    "index: no map": ("model.safetensors.index.json", '{"weight_map": 5}'),
    "tokenizer.json: a pipe": ("tokenizer.json", PIPE),
    "tokenizer.json: a list": ("tokenizer.json", "[]"),
    "tokenizer.json: no model": ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 5}}'),
    "tokenizer.json: deep": ("tokenizer.json", "[" * 100_000),
    "tokenizer_config.json: a token that is none": ("tokenizer_config.json", '{"eos_token": 5}'),
    "generation_config.json: ids": ("generation_config.json", '{"eos_token_id": "x"}'),
    "chat_template.jinja: a pipe": ("chat_template.jinja", PIPE),
    "chat_template.jinja: loops": (
        "chat_template.jinja",
        "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    ),
    "chat_template.jinja: memory": ("chat_template.jinja", "{{ 'a' * 9999999999 }}"),
    "chat_template.jinja: recursion": (
        "chat_template.jinja",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ),
    "chat_template.jinja: parentheses": (
        "chat_template.jinja",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ),
}


def write_model(folder: Path, base: Path, name: str) -> Path:
    """Copy the model directory `base` with one thing changed in it."""
    shutil.copytree(base, folder)
    file, content = MODELS[name]
    if isinstance(content, dict):
        content = json.dumps(json.loads((base / file).read_text()) | content)
    place(folder / file, content)
    return folder
