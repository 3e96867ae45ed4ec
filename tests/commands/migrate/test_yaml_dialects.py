"""Files of other libraries: read as their own loaders read them, or refused by one sentence."""

from __future__ import annotations

import os
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.commands.migrate.hydra_overrides import Script
from ratchet.commands.migrate.importer import read_config
from ratchet.commands.migrate.read_config import read_source
from ratchet.commands.migrate.shell import split_words
from ratchet.commands.migrate.yaml_dialects import MAX_BYTES, ConfigReader, Dialect
from ratchet.errors import ConfigError

BOTH = {
    "1_000": 1000,
    "0.5_5": 0.55,
    "'0.5_5'": "0.5_5",
    "010": 8,
    "0x10": 16,
    "1:30": 90,
    "yes": True,
    "Off": False,
    "n": "n",
}
OMEGACONF = {
    "1e-6": 1e-6,
    "1e5": 1e5,
    "1.5E3": 1500.0,
    "1_0.5e3": 10500.0,
    ".5e3": ".5e3",
    "2024-01-01": "2024-01-01",
    "0o17": "0o17",
}
YAML = {
    "1e-6": "1e-6",
    "1e5": "1e5",
    "1.5E3": "1.5E3",
    "1.5E+3": 1500.0,
    "~": None,
    "Null": None,
    "": None,
    ".5": 0.5,
}


@pytest.mark.fault("I1")
@pytest.mark.parametrize(
    ("dialect", "text", "value"),
    [
        *(("omegaconf", text, value) for text, value in (BOTH | OMEGACONF).items()),
        *(("yaml", text, value) for text, value in (BOTH | YAML).items()),
    ],
)
def test_scalars_are_those_of_the_peers_loader(
    tmp_path: Path, dialect: Dialect, text: str, value: Any
) -> None:
    """Expected values are those of omegaconf 2.3.1 and PyYAML 6.0.3 (SafeLoader)."""
    path = tmp_path / "a.yaml"
    path.write_text(f"key: {text}\n")
    read = ConfigReader(dialect).read_yaml(path)["key"]
    assert read == value
    assert type(read) is type(value)


def test_trl_numbers_that_yaml_leaves_as_text_are_converted(tmp_path: Path) -> None:
    """TRL's parser converts text to the type of its field: 1e-6 without a point is text in YAML
    1.1."""
    path = tmp_path / "grpo.yaml"
    path.write_text(
        "model_name_or_path: m\nnum_generations: '4'\nlearning_rate: 1e-6\nuse_vllm: 'yes'\nbeta: "
        "1_0.5\n"
    )
    result = read_config(path)
    assert result.peer.name == "trl"
    assert (result.flat["optimizer.lr"], result.flat["algorithm.group_size"]) == (1e-6, 4)
    assert result.flat["generator.kind"] == "vllm"
    assert result.flat["algorithm.kl.coef"] == 10.5


def _bomb(levels: int, form: str) -> str:
    lines = ["a0: &a0 {x: 1}" if form == "<<" else "a0: &a0 [1, 1]"]
    for level in range(1, levels):
        several = ", ".join(f"*a{level - 1}" for _ in range(9))
        lines.append(
            f"a{level}: &a{level} {{'<<': [{several}]}}".replace("'", "")
            if form == "<<"
            else f"a{level}: &a{level} [{several}]"
        )
    return "\n".join(lines)


MALFORMED = {
    "a list": ("- 1\n- 2\n", "keys and values"),
    "a word": ("hello\n", "keys and values"),
    "empty": ("", "is empty"),
    "two documents": ("a: 1\n---\nb: 2\n", "is not YAML"),
    "duplicate keys": ("loss_fn: {a: 1, a: 2}\n", "a is set twice"),
    "a duplicate by dots": ("loss_fn: {a: 1}\nloss_fn.a: 2\n", "loss_fn.a is set twice"),
    "an anchor bomb": (_bomb(9, "["), "more than 20,000 values"),
    "a merge bomb": (_bomb(9, "<<"), "more than 20,000 values"),
    "an anchor in itself": ("a: &a [*a]\n", "contains itself"),
    "an unknown anchor": ("a: *b\n", "is not YAML"),
    "nested too deep": ("a: " + "[" * 100 + "]" * 100, "levels deep"),
    "nested far too deep": ("a: " + "[" * 50_000, "levels deep"),
    "a tag": ("a: !!python/object/apply:os.system [echo]\n", "YAML tag"),
    "a tag that is read": ("a: !!binary aGk=\n", "YAML tag"),
    "a set": ("a: !!set {b}\n", "YAML"),
    "a long number": ("a: " + "9" * 5000, "can't be read as a value"),
    "a key that is a list": ("[a, b]: 1\n", "a key must be a word"),
    "a merge of a word": ("a: {<<: b}\n", "<< must name"),
    "a byte of 0": ("a: \x00\n", "is not YAML"),
    "an unknown value of !!int": ("a: !!int x\n", "can't be read as a value"),
}


@pytest.mark.medium
@pytest.mark.fault("I4")
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    text, words = MALFORMED[name]
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_command_ends_with_a_config_error(tmp_path: Path) -> None:
    """The command line ends with status 2 for a ConfigError, and without a traceback."""
    path = tmp_path / "theirs.yaml"
    path.write_text(MALFORMED["an anchor bomb"][0])
    assert isinstance(CliRunner().invoke(app, ["import", str(path)]).exception, ConfigError)


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    (tmp_path / "folder.yaml").mkdir()
    for name, words in (
        ("fifo.yaml", "is not a file"),
        ("large.yaml", "larger than 2 MiB"),
        ("latin.yaml", "UTF-8"),
        ("folder.yaml", "is not a file"),
        ("none.yaml", "there is no file"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_source(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "a is set twice"),
        ("[" * 100_000, "JSON"),
        ('{"a": ' + "9" * 5000 + "}", "JSON"),
        ("[1]", "keys and values"),
    ],
)
def test_a_malformed_json_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config(path)


def test_defaults_name_the_section_of_a_file(tmp_path: Path) -> None:
    """As ROLL's agentic files do: `- ../config/traj_envs@_here_`."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "envs.yaml").write_text("custom_envs: {size: 6}\n")
    path = tmp_path / "runs" / "agentic.yaml"
    path.parent.mkdir()
    entries = ["../config/envs@_here_", "../config/envs@val", "{../config@_here_: envs}"]
    path.write_text(f"defaults: [{', '.join(entries)}]\nseed: 1\n")
    source = read_source(path)
    assert source.values == {"custom_envs.size": 6, "val.custom_envs.size": 6, "seed": 1}
    assert not source.unresolved


@pytest.mark.parametrize(
    ("order", "rate"), [("_self_, other", 2), ("other, _self_", 1), ("other", 1)]
)
def test_own_keys_take_precedence_over_the_defaults_before_them(
    order: str, rate: int, tmp_path: Path
) -> None:
    (tmp_path / "other.yaml").write_text("optim: {lr: 2}\n")
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: [{order}]\noptim: {{lr: 1}}\n")
    assert read_source(path).values == {"optim.lr": rate}


@pytest.mark.fault("I4")
def test_defaults_that_multiply_files(tmp_path: Path) -> None:
    for level in range(9):
        (tmp_path / f"f{level}.yaml").write_text(
            f"defaults: [{', '.join([f'f{level + 1}'] * 9)}]\n"
        )
    (tmp_path / "f9.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="more than 200 files"):
        read_source(tmp_path / "f0.yaml")
    (tmp_path / "f9.yaml").write_text("defaults: [f0]\n")
    with pytest.raises(ConfigError, match="circle"):
        read_source(tmp_path / "f0.yaml")


@pytest.mark.fault("I4")
@pytest.mark.parametrize("form", ["'${{a{0}}}${{a{0}}}'", "['${{a{0}}}', '${{a{0}}}']"])
def test_interpolations_that_multiply(tmp_path: Path, form: str) -> None:
    lines = [f"a{level}: {form.format(level + 1)}" for level in range(40)]
    path = tmp_path / "a.yaml"
    path.write_text("\n".join([*lines, "a40: xx", ""]))
    source = read_source(path)
    assert "resolve to more than" in source.unresolved["a0"]
    assert source.values["a40"] == "xx"


# --- scripts


def script(text: str) -> Script:
    read = Script()
    read.read(text)
    return read


def test_an_override_given_twice_is_told() -> None:
    read = script("python -m verl.main a.b=1 \\\n  a.b=2 a.c=3\n")
    assert read.nested == {"a": {"b": 2, "c": 3}}
    assert read.repeated == {"a.b": "1"}


def test_what_a_script_takes_out_or_varies_is_told() -> None:
    read = script("python -m verl.main ~a.b '~a.c=1' a.d=1,2 a.e='range(1,3)' a.f=1\n")
    assert read.nested == {"a": {"f": 1}}
    assert set(read.unresolved) == {"~a.b", "~a.c", "a.d", "a.e"}


@pytest.mark.parametrize(
    "setting",
    [
        "if [ 1 = 2 ]; then\n  N=2\nfi",
        "if [ 1 = 2 ]; then\nN=2\nfi",
        "[ 1 = 2 ] && N=2",
        "M=1; N=2",
        "export M=1 N=2",
        "declare -i N=2",
        "for N in 2 3; do true; done",
        "read N",
        "unset N",
        "N+=1",
        "let N=2",
        "((N=2))",
        ": ${N:=2}",
        "((++N))",
        "read -r M N",
        "case x in x) N=2;; esac",
        "if N=2; then true; fi",
        "! N=2",
        "time N=2",
        "until N=2; do true; done",
        "getopts x N",
        "declare -n M=N",
        "N[0]=2",
        "trap 'N=2' DEBUG",
        "eval N=2",
        "eval $SETTING",
        "source settings.sh",
        ". settings.sh",
        "f()\n{\nN=2\n}",
        "(\nN=2\n)",
        "[ 1 = 2 ] && {\nN=2\n}",
    ],
)
def test_a_variable_that_may_have_changed_is_unknown(setting: str) -> None:
    read = script(f"N=1\n{setting}\npython -m verl.main a.b=$N a.c=${{N:-3}} a.d=4\n")
    assert read.nested == {"a": {"d": 4}}
    assert set(read.unresolved) == {"a.b", "a.c"}


@pytest.mark.parametrize(
    "setting",
    ["let N=2", "read -r M N", "IFS=, read M N", "for N in 2 3; do", "(( N = 2 ))", "N=(2 3)"],
)
def test_a_default_is_not_the_value_of_a_variable_that_a_command_sets(setting: str) -> None:
    assert set(script(f"{setting}\npython -m x a.b=${{N:-3}}\n").unresolved) == {"a.b"}


def test_variables_in_keys_and_quoted_commands_are_read() -> None:
    text = 'A=a\nN=3\npython -m x $A.b=1 ${A}.c=2\nsrun bash -lc "python -m x a.d=$N a.e=4"\n'
    assert script(text).nested == {"a": {"b": 1, "c": 2, "d": 3, "e": 4}}
    read = script("python -m x $A.b=1 a.{c,d}=2 a.e=3 --f.g=4\n")
    assert (read.nested, set(read.unresolved)) == ({"a": {"e": 3}}, {"$A.b", "a.{c,d}"})


@pytest.mark.parametrize(
    ("line", "nested"),
    [
        ("a.b=data/x#1.parquet a.c=1", {"b": "data/x#1.parquet", "c": 1}),
        ("a.b='#1' a.c=1 # a.d=2", {"b": "#1", "c": 1}),
        ("a.b=qwen; echo a.c=1", {"b": "qwen"}),
        ("a.b=qwen|tee log", {"b": "qwen"}),
        ('a.b="x;y"', {"b": "x;y"}),
        ("a.b=1>log a.c=2 2>/dev/null", {"b": 1, "c": 2}),
        ("a.b=1 > a.c=2", {"b": 1}),
        ('"a.b=\\${x.y}"', {"b": "${x.y}"}),
    ],
)
def test_words_of_a_command_are_the_shells(line: str, nested: dict[str, Any]) -> None:
    read = script(f"python -m verl.main {line}\necho a.b=9\n")
    assert read.nested == {"a": nested}


def test_what_a_script_does_not_pass_on_is_told() -> None:
    """A comment ends a command, and $ in single quotes or a backquote has no value here."""
    read = script(
        "python -m verl.main a.b=1 \\\n  # a.x=1 \\\n  a.c=2 \\\n  a.d=3\npython -m verl.main "
        "a.e=`nproc` a.f='$N'\n"
    )
    assert read.nested == {"a": {"b": 1}}
    assert set(read.unresolved) == {"a.c", "a.d", "a.e", "a.f"}


def test_what_the_shell_works_out_is_not_guessed() -> None:
    """No form of ${...} is taken for an interpolation of theirs, which has to be escaped."""
    forms = ["${N:+4}", "${N:0:1}", "${#N}", "${N/1/2}", "${!N}", "${N^^}", "${N%/*}", "${N[1]}"]
    for form in [*forms, "${A:-${B:-7}}", "$((N ** 2))"]:
        read = script(f"N=12\npython -m verl.main a.b={form} a.c=1\n")
        assert read.nested == {"a": {"c": 1}}, form
        assert set(read.unresolved) == {"a.b"}, form
    assert script("N=12\npython -m x a.b=$((N + 1))\n").nested == {"a": {"b": 13}}
    assert script("N=\npython -m x a.b=${N:-4} a.c=${N-5} a.d=${M-6}\n").nested == {
        "a": {"b": 4, "c": "", "d": 6}
    }


def test_a_variable_of_several_overrides_is_split() -> None:
    read = script(
        "MORE='a.b=1 a.c=2'\nTWO='3 a.e=4'\npython -m verl.main $MORE a.d=$TWO $UNKNOWN \"$@\" $1\n"
    )
    assert read.nested == {"a": {"b": 1, "c": 2}}
    assert set(read.unresolved) == {"a.d", "$UNKNOWN"}


def test_what_a_script_only_writes_is_no_command() -> None:
    text = "cat <<'EOF' > other.sh\nN=2\npython -m x a.b=9\nEOF\npython -m x a.b=1\n"
    assert script(text).nested == {"a": {"b": 1}}
    assert script("bash <<EOF\npython -m x a.b=9\nEOF\n").nested == {"a": {"b": 9}}
    assert script("env A=2 python -m x a.b=1\n").nested == {"a": {"b": 1}}


@pytest.mark.medium
@pytest.mark.fault("I4")
def test_a_script_that_multiplies_its_variables_or_has_no_end_is_read_in_time() -> None:
    doubling = "A=xxxx\n" + "A=$A$A\n" * 60
    read = script(f"{doubling}python -m x a.b=$A a.c={'$B' * 9} a.d={'$A' * 1000}\n")
    assert read.nested == {}
    assert set(read.unresolved) == {"a.b", "a.c", "a.d"}
    assert script(f"python -m x a.b={'x' * 300_000}\n").nested == {"a": {"b": "x" * 300_000}}
    with pytest.raises(ConfigError, match="characters, the limit"):
        script("x" * 1_000_000)


@pytest.mark.parametrize("seed", range(4))
def test_words_are_those_of_shlex(seed: int) -> None:
    rng = random.Random(seed)
    signs = ["a", "b", "=", " ", '"', "'", "\\", "1", ";", "|", "&", "\t", ".", "#"]
    for _ in range(500):
        line = "".join(rng.choices(signs, k=rng.randrange(1, 14)))
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            expected = list(lexer)
        except ValueError:
            if not line.endswith("\\"):
                with pytest.raises(ValueError, match="quote"):
                    split_words(line)
            continue
        assert split_words(line) == expected, line


def test_an_array_begins_and_ends_beside_its_words() -> None:
    text = 'ARGS=(a.b=1 # one\n a.c=qwen)\npython -m x a.d=1 "${ARGS[@]}"\n'
    assert script(text).nested == {"a": {"b": 1, "c": "qwen", "d": 1}}


def test_only_what_an_array_gives_the_command_counts() -> None:
    read = script(
        "A=(a.b=1)\nUNUSED=(a.c=2)\nif [ $1 ]; then\nA+=(a.d=3)\nfi\nA+=(a.e=4)\n"
        'python -m x a.e=5 "${A[@]}"\n'
    )
    assert read.nested == {"a": {"b": 1}}
    assert set(read.unresolved) == {"a.d", "a.e"}  # which of two values counts hangs on their order


def test_a_line_with_an_open_quote_is_told() -> None:
    read = script("python -m verl.main a.b=1\npython -m x a.c='1\n a.d=2'\n")
    assert set(read.unresolved) == {"a.c", "a.d"}


def test_keys_without_a_dot_count_in_a_command() -> None:
    """`model_engine=megatron` chooses the learner there; FOO=1 before a command is the shell's."""
    read = script(
        "FOO=1 python -m verl.main --config-name=base model_engine=megatron a.b=1\nexport X=2\n"
    )
    assert read.nested == {"--config-name": "base", "model_engine": "megatron", "a": {"b": 1}}
    assert script("ARGS=(\n  model_engine=megatron\n  a.b=1\n)\nrun ${ARGS[@]}\n").nested == {
        "model_engine": "megatron",
        "a": {"b": 1},
    }
    chosen = script("python -m x engine=fsdp engine.size=2\n")
    assert chosen.nested == {"engine": {"size": 2}}
    assert "chooses a config file" in chosen.unresolved["engine"]


def test_the_base_of_a_script_says_what_trains(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer' "
        "algorithm.adv_estimator=grpo\n"
    )
    result = read_config(path)
    assert result.flat["learner.kind"] == "megatron"
    assert "is not read" in next(
        item.note for item in result.items if item.peer_key == "--config-name"
    )
