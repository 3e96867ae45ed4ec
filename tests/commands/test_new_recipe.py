"""A first file of one's own: `ratchet new recipe --like` writes a recipe that checks, trains,
evaluates and reports at the first try, without an edit."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from pages import run as run_python
from support.rotation import todays
from tiny_llama import make_llama
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.commands.new.command import RecipeRequest, scaffold_recipe
from ratchet.commands.new.recipe import _choose_batch, _choose_rate
from ratchet.config.loader import load_config
from ratchet.errors import ConfigError, DataError, RunDirectoryError
from ratchet.training.start import start_run

SUMS = [(f"What is {a} plus {b}?", str(a + b)) for a in range(8) for b in range(8)]
QUICK = ["steps=2", "optimizer.warmup_steps=0", "evaluation.every=0", "logging.tensorboard=false"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "llama", [f"{q} {a}" for q, a in SUMS])


@pytest.fixture
def here(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, and the user's files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as the program does
    (tmp_path / "llama").symlink_to(llama)
    with (tmp_path / "qa.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *SUMS])
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in SUMS]
    write_rows(tmp_path / "chat.jsonl", [{"messages": chat} for chat in chats])
    write_rows(
        tmp_path / "pairs.jsonl",
        [{"prompt": q, "chosen": a, "rejected": a + "0"} for q, a in SUMS],
    )
    write_rows(
        tmp_path / "labels.jsonl",
        [{"question": q, "completion": a, "label": len(q) % 2 == 0} for q, a in SUMS],
    )
    write_rows(tmp_path / "text.jsonl", [{"text": f"{q} {a}"} for q, a in SUMS])
    (tmp_path / "mine.py").write_text(
        "def right(trajectory, task): return float(task.answer in trajectory.messages[-1].text)\n"
        "def score(completions, answer, **kwargs): return [float(a in c) for a, c in zip(answer, completions)]\n"
    )
    return tmp_path


def new(*words: str) -> str:
    done = CliRunner().invoke(app, ["new", "recipe", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


JOURNEYS = {
    "sft": (["--like", "sft", "--data", "qa.csv"], "Held-out loss"),
    "chat": (["--like", "sft", "--data", "chat.jsonl"], "Held-out loss"),
    "text": (["--like", "sft", "--data", "text.jsonl"], "Held-out loss"),
    "dpo": (["--like", "dpo", "--data", "pairs.jsonl"], "Held-out accuracy"),
    "scores": (["--like", "reward_model", "--data", "pairs.jsonl"], "Held-out accuracy"),
    "kto": (["--like", "kto", "--data", "labels.jsonl"], "Held-out loss"),
    "grpo": (
        ["--like", "grpo", "--data", "qa.csv", "--reward", "mine.py:right"],
        "Held-out accuracy",
    ),
    "shipped": (
        ["--like", "lora", "--data", "qa.csv", "--reward", "exact_match"],
        "Held-out accuracy",
    ),
    "distilled": (
        ["--like", "distillation", "--data", "qa.csv", "--teacher", "llama"],
        "Held-out loss",
    ),
    "guided": (
        ["--like", "on_policy_distillation", "--data", "qa.csv", "--teacher", "llama"],
        "Held-out loss",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("chat", "grpo", "sft") else pytest.mark.slow)
        for name in JOURNEYS
    ],
)
def test_a_first_file_works_at_the_first_try(
    here: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    words, title = JOURNEYS[name]
    said = new(name, *words, "--model", "llama")
    assert said.split("\n")[0] == f"{name}.yaml"
    checked = CliRunner().invoke(app, ["check", f"{name}.yaml"], catch_exceptions=False)
    assert checked.exit_code == 0
    run = Path("runs") / name
    quick = [*QUICK, *(["sampling.max_new_tokens=4"] if "--reward" in words else [])]
    assert start_run(Path(f"{name}.yaml"), quick, None, command="train") == 0
    assert title in capsys.readouterr().out
    (stage,) = json.loads((run / "summary.json").read_text())["stages"]
    measure = title.removeprefix("Held-out ")
    assert stage[f"{measure}_before"] is not None
    assert stage[f"{measure}_after"] is not None
    evaluated = CliRunner().invoke(
        app, ["eval", str(run), "--samples", "0"], catch_exceptions=False
    )
    assert evaluated.exit_code == 0
    assert measure in evaluated.output
    reported = CliRunner().invoke(app, ["report", str(run)], catch_exceptions=False)
    assert reported.exit_code == 0
    assert (run / "report.html").is_file()
    listed = CliRunner().invoke(app, ["runs", "list", "runs", "--json"], catch_exceptions=False)
    (row,) = json.loads(listed.output)
    assert row[measure] == pytest.approx(stage[f"{measure}_after"])


def test_a_reward_written_for_trl_is_called_as_trl_does(here: Path):
    new("--like", "grpo", "--data", "qa.csv", "--model", "llama", "--reward", "mine.py:score")
    assert "rewards: [{kind: trl, function: 'mine:score'}]" in Path("grpo.yaml").read_text()
    checked = CliRunner().invoke(app, ["check", "grpo.yaml"], catch_exceptions=False)
    assert checked.exit_code == 0, checked.output


@pytest.mark.slow
@pytest.mark.parametrize("name", [*todays(["sft", "chat"], 1), "dpo", "grpo"])
def test_the_whole_journey_as_a_user_makes_it(here: Path, name: str):
    """Unedited, each command in a process of its own."""
    words, title = JOURNEYS[name]

    def ratchet(*arguments: str) -> str:
        return run_python(here, "-m", "ratchet", *arguments)

    ratchet("new", "recipe", name, *words, "--model", "llama")
    ratchet("check", f"{name}.yaml")
    assert title in ratchet("train", f"{name}.yaml")
    ratchet("eval", f"runs/{name}")
    ratchet("report", f"runs/{name}")
    (stage,) = json.loads((here / "runs" / name / "summary.json").read_text())["stages"]
    if title == "Held-out loss":
        assert stage["loss_after"] < stage["loss_before"] - 0.5


def test_every_line_has_a_comment_that_is_true(here: Path):
    said = new("--like", "sft", "--data", "qa.csv", "--model", "llama")
    assert said.endswith("next: ratchet check sft.yaml && ratchet train sft.yaml\n")
    text = Path("sft.yaml").read_text()
    assert all("#" in line for line in text.splitlines() if line != "environment:")
    assert "64 rows; question is the prompt, answer the answer" in text
    config = load_config("sft.yaml")
    (stage,) = config.stages
    assert config.model.path == "llama"
    assert stage.batch_size <= 64
    assert 0 < stage.environment.test_share < 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("like", ["sft", "grpo"])
def test_rows_that_the_model_can_not_hold_are_left_out_and_counted(here: Path, like: str):
    rows = [{"question": q, "answer": a} for q, a in SUMS]
    rows[3] = {"question": "9" * 999, "answer": "9"}
    write_rows(here / "long.jsonl", rows)
    reward = ["--reward", "mine.py:right"] if like == "grpo" else []
    new("--like", like, "--data", "long.jsonl", "--model", "llama", *reward)
    (line,) = [text for text in Path(f"{like}.yaml").read_text().splitlines() if "too_long" in text]
    assert line.startswith("  too_long: drop")
    assert "# 1 of the first 5" in line
    assert line.endswith(" rows have more tokens than the model's 256")
    load_config(f"{like}.yaml")


def test_the_recipe_says_which_column_is_the_answer_or_that_none_is(here: Path):
    verl = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": 2}}
    grpo = ["--like", "grpo", "--reward", "mine.py:right", "--model", "llama"]
    for name, row, said in (
        ("verl", verl, "prompt is the prompt, reward_model.ground_truth the answer"),
        ("other", {"prompt": "1 + 1?", "truth": "2"}, "prompt is the prompt, without an answer"),
    ):
        write_rows(here / f"{name}.jsonl", [row] * 8)
        new(name, "--data", f"{name}.jsonl", *grpo)
        assert said in Path(f"{name}.yaml").read_text()


@pytest.mark.medium
@pytest.mark.parametrize("rows", [1, 3, 4, 600])
def test_few_rows_and_many_are_held_out_in_part(here: Path, rows: int):
    path = here / "some.csv"
    path.write_text("question,answer\n" + "".join(f"Q{i}?,A{i}\n" for i in range(rows)))
    new("some", "--like", "sft", "--data", "some.csv", "--model", "llama")
    (stage,) = load_config("some.yaml").stages
    assert (stage.evaluation.tasks == 0) == (rows < 4)
    assert stage.batch_size <= rows
    assert (
        start_run(Path("some.yaml"), ["steps=1", "optimizer.warmup_steps=0"], None, command="") == 0
    )


def test_batches_and_rates_follow_the_size():
    assert _choose_batch(1, "rows") == (1, 20)
    assert _choose_batch(3, "rows") == (2, 20)
    assert _choose_batch(64, "rows") == (16, 20)
    assert _choose_batch(10_000, "rows") == (32, 938)
    assert _choose_batch(10**7, "rollouts") == (16, 1000)
    assert _choose_rate(3e4, "rows", with_adapter=False)[0] == "2e-3"
    assert _choose_rate(5e8, "pairs", with_adapter=False)[0] == "5e-6"
    assert _choose_rate(None, "rollouts", with_adapter=True)[0] == "1e-5"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("--like grpo --data qa.csv", ConfigError, "grpo learns from rewards: add --reward"),
        ("--like grpo --data qa.csv --reward mine.py:left", ConfigError, "has no 'left'"),
        ("--like grpo --data qa.csv --reward nine.py:right", ConfigError, "no file nine.py"),
        ("--like grpo --data qa.csv --reward exact", ConfigError, "exact is not a built-in kind"),
        ("--like grpo --data qa.csv --reward lone.py:f", ConfigError, "a reward takes"),
        ("--like grpo --data text.jsonl --reward mine.py:right", DataError, r"line \d+: .*prompt"),
        ("--like distillation --data qa.csv", ConfigError, "add --teacher DIR"),
        ("--like sft --data qa.csv --teacher llama", ConfigError, "--teacher is not read by sft"),
        ("--like dppo --data qa.csv", ConfigError, r"nor a shipped recipe: did you mean \w*po\?"),
        ("--like dpo --data qa.csv", DataError, r"line \d+: no column 'chosen'"),
        ("--like sft --data long.jsonl", DataError, "line 1: .* but the model holds 256: shorten"),
        ("--like sft --data no.csv", DataError, "there is no such file"),
        ("--like sft --data odd.jsonl", DataError, r"columns`: \{prompt: q, answer: a\}"),
        ("--like sft --data qa.csv --model .", ConfigError, "no Hugging Face directory"),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_written(
    here: Path, words: str, error: type[Exception], message: str
):
    (here / "lone.py").write_text("def f(answer): return 1.0\n")
    write_rows(here / "odd.jsonl", [{"q": "Q", "a": "A"}])
    write_rows(here / "long.jsonl", [{"prompt": "Q", "answer": "9" * 999}])
    options = dict(zip(*[iter(words.replace("--", "").split())] * 2, strict=True))
    request = RecipeRequest(**{"model": "llama", **options})
    with pytest.raises(error, match=message):
        scaffold_recipe(None, request)
    assert not list(here.glob("*.yaml"))


def test_options_go_together(here: Path):
    for words, message in (
        (["recipe", "--like", "sft"], "--data is missing: --like, --data and --model go together"),
        (
            ["environment", "x", "--reward", "math"],
            "--reward is for a new recipe, not a new environment",
        ),
        (["recipe"], "the name is missing: ratchet new recipe NAME"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, ["new", *words], catch_exceptions=False)


def test_a_name_may_have_the_suffix_of_its_file(here: Path):
    new("mine.yaml", "--like", "sft", "--data", "qa.csv", "--model", "llama")
    assert load_config("mine.yaml").name == "mine"


def test_a_run_is_a_model(here: Path):
    run = here / "runs/first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    with pytest.raises(RunDirectoryError, match="has no finished model yet"):
        new("--like", "sft", "--data", "qa.csv", "--model", "runs/first")
    (run / "model").symlink_to(here / "llama")
    new("--like", "sft", "--data", "qa.csv", "--model", "runs/first")
    assert load_config("sft.yaml").model.path == "runs/first"


def test_a_model_of_the_hub_is_not_fetched(here: Path):
    new("--like", "dpo", "--data", "pairs.jsonl", "--model", "owner/name")
    assert load_config("dpo.yaml").model.path == "owner/name"


def test_a_line_end_in_a_files_name_does_not_break_the_recipe(here: Path):
    (here / "q\na.csv").write_bytes((here / "qa.csv").read_bytes())
    scaffold_recipe("mine", RecipeRequest("sft", "q\na.csv", "llama"))
    assert load_config("mine.yaml").stages[0].environment.train == (Path("q\na.csv"),)
