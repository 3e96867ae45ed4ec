"""`ratchet eval`: a run, a bare model, an API, and two of them against each other."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rewards.fake_http import Answer, chat, serve

from ratchet.commands.eval import evaluate_target
from ratchet.commands.eval_setup import EndpointSettings, EvaluationSettings, build_eval_setup
from ratchet.commands.model_target import Target, open_target
from ratchet.config.yaml_tree import write_text
from ratchet.data.jsonl import DataRow
from ratchet.environments.datasets.dataset_rows import DatasetRowReader, RowContents
from ratchet.errors import (
    CheckpointNotFound,
    ConfigError,
    DataError,
    RatchetError,
    RunDirectoryError,
)
from ratchet.evals.results import EvalResults
from ratchet.runs.run_dir import RunDirectory
from ratchet.training.start import start_run

RECIPE: dict[str, Any] = {
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": {"hidden_size": 16, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "logging": {"progress": "off", "tensorboard": False},
    "algorithm": {"kind": "sft"},
    "steps": 1,
    "batch_size": 2,
    "evaluation": {"tasks": 4, "environment": {"kind": "sorting", "digits": 3}},
}
FEW = EvaluationSettings(tasks=3, samples=2)
SORTING = EvaluationSettings(
    on="sorting", overrides=["digits=2"], tasks=4, samples=2, endpoint=EndpointSettings(model="m")
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    assert start_run(folder / "recipe.yaml", [], folder / "run", command="test") == 0
    return folder / "run"


def sorts(body: Any, number: int) -> Any:
    return chat("".join(sorted(body["messages"][-1]["content"].rstrip("="))))


@pytest.mark.medium
def test_a_run_is_evaluated_where_its_recipe_says(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    evaluate_target(str(run), FEW, out=tmp_path / "out")
    found = EvalResults.read(tmp_path / "out")
    assert (len(found.prompts), found.samples) == (3, 2)
    assert {prompt.id.split("/")[0] for prompt in found.prompts} == {"sorting"}
    assert found.about["max_new_tokens"] == 3
    assert len(EvalResults.read(run / "evals" / "sft" / "step-00000001").prompts) == 4
    shown = capsys.readouterr().out
    assert "mean@2" in shown
    assert "pass@2" in shown
    assert "accuracy" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.medium
def test_results_are_numbered_in_the_run(run: Path):
    evaluate_target(str(run), FEW)
    evaluate_target(str(run), FEW)
    assert (
        EvalResults.read(run / "evals" / "sorting-1").prompts
        == EvalResults.read(run / "evals" / "sorting-2").prompts
    )


STAGES = [
    {"name": "first", "algorithm": {"kind": "sft"}, "steps": 2},
    {"name": "second", "algorithm": {"kind": "sft"}, "steps": 2, "optimizer": {"lr": 0.1}},
]


def saved_run(folder: Path, learner: Any = None, **second: Any) -> Path:
    """A run with a checkpoint of every step. learner: of both stages. second: more keys of its
    second one."""
    own = {key: value for key, value in RECIPE.items() if key not in ("algorithm", "steps")}
    stages = [STAGES[0], {**STAGES[1], **second}]
    recipe = {**own, "checkpoint": {"every": 1, "keep": 9}, "stages": stages}
    recipe |= {"learner": learner} if learner else {}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert start_run(folder / "recipe.yaml", [], folder / "run", command="test") == 0
    return folder / "run"


def weights_of(target: Target) -> dict[str, torch.Tensor]:
    return dict(target.policy.model.canonical_weights())


RANKS = {"learner": {"kind": "dtensor", "dp_shard": 2}}
LORA = {"lora": {"rank": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, LORA, RANKS, pytest.param({**LORA, **RANKS}, marks=pytest.mark.slow)],
    ids=["all", "adapter", "ranks", "adapter on ranks"],
)
def test_a_checkpoint_has_the_weights_of_its_step(tmp_path: Path, more: dict[str, Any]):
    run = saved_run(tmp_path, **more)
    last, trained = open_target(run, step=4), open_target(run)
    assert weights_of(last).keys() == weights_of(trained).keys()
    assert all(
        torch.equal(weight, weights_of(trained)[name]) for name, weight in weights_of(last).items()
    )
    earlier = open_target(run / "checkpoints" / "step-00000002")
    assert earlier.config is not None
    assert [stage.name for stage in earlier.config.stages] == ["first"]
    assert any(
        not torch.equal(weight, weights_of(trained)[name])
        for name, weight in weights_of(earlier).items()
    )


@pytest.mark.slow
def test_a_run_is_evaluated_while_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = saved_run(tmp_path)
    (run / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match=r"no finished model yet.*--step 4"):
        evaluate_target(str(run), FEW)
    evaluate_target(
        str(run), replace(FEW, step=2), against=str(run / "checkpoints" / "step-00000002")
    )
    assert "step 2" in capsys.readouterr().out
    by_step, by_path = (EvalResults.read(run / "evals" / f"sorting-{number}") for number in (1, 2))
    assert by_step.prompts == by_path.prompts
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 7"):
        evaluate_target(str(run), replace(FEW, step=7))
    with pytest.raises(ConfigError, match="--step 2 is only for runs"):
        evaluate_target(str(tmp_path / "elsewhere"), replace(FEW, step=2))


@pytest.mark.medium
def test_a_checkpoint_that_only_megatron_reads_is_refused(tmp_path: Path):
    run = saved_run(tmp_path)
    config = RunDirectory(run).read_config()
    for stage in config["stages"]:
        stage["learner"] = {"kind": "megatron"}
    config["kernels"] = "torch"
    RunDirectory(run).config.write_text(write_text(config))
    with pytest.raises(
        ConfigError, match=r"stage first trained with learner\.kind=megatron.*finish the run"
    ):
        open_target(run, step=2)


@pytest.mark.medium
def test_a_bare_model_and_another_environment(run: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="add --recipe RECIPE, or --on KIND"):
        evaluate_target(str(run / "model"), FEW, out=tmp_path)
    evaluate_target(
        str(run / "model"),
        EvaluationSettings(on="sorting", overrides=["digits=2"], tasks=2, max_new_tokens=2),
        out=tmp_path,
    )
    assert EvalResults.read(tmp_path).about["max_new_tokens"] == 2
    with pytest.raises(ConfigError, match="dgits"):
        evaluate_target(
            str(run), EvaluationSettings(on="sorting", overrides=["dgits=2"]), out=tmp_path
        )


def test_a_generator_may_be_chosen(run: Path, tmp_path: Path):
    with pytest.raises(RatchetError, match=r"generator\.kind to engine"):
        evaluate_target(str(run), EvaluationSettings(tasks=1, generator="hf"), out=tmp_path)


def test_an_api_against_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serve(sorts) as fake:
        evaluate_target(f"{fake.url}/v1", SORTING, against=str(run), out=tmp_path)
        assert len(fake.seen) == 4 * 3
    one, two = EvalResults.read(tmp_path), EvalResults.read(tmp_path / "against")
    assert one.accuracy.value == 1.0
    assert [prompt.digest for prompt in one.prompts] == [prompt.digest for prompt in two.prompts]
    assert "A against B" in capsys.readouterr().out
    # What was found can be compared again, and nothing is generated.
    evaluate_target(str(tmp_path), FEW, against=str(tmp_path / "against" / "results.json"))
    assert "A against B" in capsys.readouterr().out


@pytest.mark.slow
def test_a_benchmark_is_asked_whole_and_has_its_subjects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [
        {
            "question": f"{i}?",
            "subject": "ab"[i % 2],
            "choices": ["w", "x", "y", "z"],
            "answer": i % 4,
        }
        for i in range(24)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = EvaluationSettings(
        on="mmlu",
        overrides=[f"test={tmp_path / 'test.jsonl'}"],
        samples=0,
        endpoint=EndpointSettings(model="m", concurrency=64),
    )
    with serve(lambda body, _: chat("Surely the answer is A.")) as fake:
        evaluate_target(f"{fake.url}/v1", chosen, out=tmp_path / "out")
    found = EvalResults.read(tmp_path / "out")
    assert (len(found.prompts), found.accuracy.value) == (24, 0.25)
    assert found.about["tasks"] == 24
    assert {tag: found.for_tag(tag).accuracy.value for tag in found.tags} == {"a": 0.5, "b": 0.0}
    assert found.prompts[0].votes
    assert {prompt.greedy.answer for prompt in found.prompts if prompt.greedy} == {"A"}
    assert "By tag" in capsys.readouterr().out
    assert (
        build_eval_setup(None, chosen)[1].evaluation.tasks == sys.maxsize
    )  # not the 512 of a recipe


@pytest.mark.medium
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_each_held_out_row_is_parsed_once(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
):
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(10, 30)]
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = RECIPE | {
        "environment": {"kind": "dataset", "test": str(tmp_path / "test.jsonl")},
        "rewards": [{"kind": "exact_match"}],
        "algorithm": {"kind": algorithm},
    }
    recipe.pop("evaluation")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    parsed: list[str] = []
    read = DatasetRowReader.read

    def count(reader: DatasetRowReader, row: DataRow, where: str) -> RowContents:
        parsed.append(where)
        return read(reader, row, where)

    monkeypatch.setattr(DatasetRowReader, "read", count)
    few = EvaluationSettings(recipe=tmp_path / "recipe.yaml", tasks=15, samples=0)
    evaluate_target(str(run / "model"), few, out=tmp_path / "out")
    assert len(EvalResults.read(tmp_path / "out").prompts) == 15
    assert len(parsed) == len(set(parsed)) == 15


@pytest.mark.medium
def test_the_process_is_prepared_as_for_training(run: Path, tmp_path: Path):
    """It has the run's number of threads, and garbage collection does not traverse all attempts."""
    before = gc.get_threshold(), torch.get_num_threads()
    gc.set_threshold(700, 10, 10)
    torch.set_num_threads(3)
    try:
        evaluate_target(str(run), EvaluationSettings(tasks=1, samples=0), out=tmp_path / "out")
        assert gc.get_threshold()[0] == 200_000
        assert torch.get_num_threads() == 1
    finally:
        gc.set_threshold(*before[0])
        torch.set_num_threads(before[1])


@pytest.mark.medium
def test_other_tasks_can_not_be_compared(run: Path, tmp_path: Path):
    evaluate_target(str(run), SORTING, out=tmp_path / "two")
    with pytest.raises(DataError, match="differs between"):
        evaluate_target(str(run), FEW, against=str(tmp_path / "two"), out=tmp_path / "three")


@pytest.mark.medium
def test_keys_belong_to_an_environment_that_is_named(run: Path):
    with pytest.raises(ConfigError, match="'digits=4' is a key of the environment that --on names"):
        evaluate_target(str(run), EvaluationSettings(overrides=["digits=4"]))


@pytest.mark.medium
def test_the_oracle_plays_the_demonstrations(tmp_path: Path):
    for _ in range(2):  # the second one replaces the results of the first
        evaluate_target("oracle", replace(SORTING, samples=2), out=tmp_path / "out")
    results = EvalResults.read(tmp_path / "out")
    assert (results.accuracy.value, results.about["samples"]) == (1.0, 0)
    with pytest.raises(ConfigError, match="oracle has no recipe that names tasks"):
        evaluate_target("oracle", EvaluationSettings())
    undemonstrated = EvaluationSettings(on="gymnasium", overrides=["id=FrozenLake-v1"], tasks=1)
    with pytest.raises(RatchetError, match="has no solutions"):
        evaluate_target("oracle", undemonstrated, out=tmp_path / "none")


@pytest.mark.parametrize("name", ["results.json", "report.md", "against/results.json"])
def test_files_of_a_user_are_not_overwritten(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match="of something else, which is not overwritten"):
        evaluate_target("oracle", SORTING, out=tmp_path)
    assert (tmp_path / name).read_text() == '{"mine": 1}'


def test_results_that_cannot_be_written_are_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(RatchetError, match="the results are not in"):
        evaluate_target("oracle", SORTING, out=tmp_path / "file" / "results")


@pytest.mark.medium
def test_mistakes_with_an_api(tmp_path: Path):
    with pytest.raises(ConfigError, match="--model is missing"):
        evaluate_target("http://localhost:1/v1", EvaluationSettings(on="sorting"))
    with pytest.raises(ConfigError, match="add --on KIND, or --recipe"):
        evaluate_target(
            "http://localhost:1/v1", EvaluationSettings(endpoint=EndpointSettings(model="m"))
        )
    with pytest.raises(ConfigError, match="--generator vllm is only for models that run here"):
        evaluate_target(
            "http://localhost:1/v1",
            EvaluationSettings(
                on="sorting", generator="vllm", endpoint=EndpointSettings(model="m")
            ),
        )
    with pytest.raises(ConfigError, match="leave no attempt"):
        evaluate_target(
            "http://localhost:1/v1",
            EvaluationSettings(
                on="sorting", greedy=False, samples=0, endpoint=EndpointSettings(model="m")
            ),
        )


@pytest.mark.medium
def test_where_nothing_could_be_judged_the_results_are_written_and_it_is_an_error(tmp_path: Path):
    with (
        serve(lambda body, _: Answer("no", 400)) as fake,
        pytest.raises(RatchetError, match=r"no attempt has a reward.*400"),
    ):
        evaluate_target(f"{fake.url}/v1", SORTING, out=tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["failures"] == {"endpoint": 12}


@pytest.mark.medium
def test_results_survive_on_their_own(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(run / "evals" / "sft" / "step-00000000", tmp_path / "before")
    evaluate_target(
        str(tmp_path / "before"), FEW, against=str(run / "evals" / "sft" / "step-00000001")
    )
    assert "greedy" in capsys.readouterr().out
