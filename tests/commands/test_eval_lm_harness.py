"""`ratchet eval --lm-eval`: what is refused before a model is loaded, and the harness's command."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import ratchet

from ratchet.commands.eval_lm_harness import HarnessSettings, convert_options, make_command
from ratchet.commands.eval_program import ServedAddress


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--lm-eval", "typo.yaml"], "--lm-eval=typo.yaml is not a file"),
        (["run", "--lm-eval", "gsm8k", "--samples", "4"], "--samples has no effect beside"),
        (["run", "--lm-eval", "gsm8k", "--temperature", "0"], "remove --temperature"),
        (["run", "--lm-eval", "gsm8k", "--no-greedy"], "remove --greedy"),
        (
            ["run", "limit=5", "--lm-eval", "gsm8k"],
            "which `ratchet eval` sets itself. Set --tasks instead.",
        ),
        (["run", "apply_chat_template", "--lm-eval", "gsm8k"], "write it as key=value"),
        (["http://127.0.0.1:9/v1", "--lm-eval", "gsm8k"], "is served already"),
    ],
)
def test_what_it_does_not_take_is_named(arguments: list[str], message: str) -> None:
    done = ratchet("eval", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_options_and_rows_reach_the_harness() -> None:
    options = convert_options(["num-fewshot=5", "apply_chat_template=true", "gen_kwargs=a=1"])
    command = make_command(
        "lm_eval",
        HarnessSettings("gsm8k,my.yaml", max_rows=3),
        options,
        ServedAddress("http://127.0.0.1:5/v1", "key", 512),
        Path("model"),
        Path("out"),
    )
    words = " ".join(command)
    assert "base_url=http://127.0.0.1:5/v1/completions,tokenizer=model," in words
    assert "max_length=512" in words
    assert "--tasks gsm8k my.yaml --output_path out --log_samples --limit 3" in words
    assert words.endswith("--num_fewshot 5 --apply_chat_template --gen_kwargs a=1")
