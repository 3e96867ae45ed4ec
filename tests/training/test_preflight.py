"""`ratchet check`, and the start of a run, open what a recipe names."""

import asyncio
import json
import re
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from models.convert import cases

from ratchet.cli.errors import WRONG_INPUT
from ratchet.config.loader import load_config
from ratchet.config.model_shape.presets import get_preset
from ratchet.errors import ConfigError, RatchetError
from ratchet.executors.event_loop import run_event_loop
from ratchet.models.load import init_policy
from ratchet.protocols import Reward
from ratchet.testing import answered
from ratchet.training.from_config import build_policy, get_adapter_base_dir
from ratchet.training.preflight import _score, run_preflight
from ratchet.training.stage_from_config import build_run
from ratchet.training.start import start_run
from ratchet.types import Task
from ratchet.utils.user_frames import describe_user_error

BASE = {
    "model": {"preset": "tiny"},
    "tokenizer": {"kind": "bytes", "template": "turns"},
    "steps": 1,
    "batch_size": 2,
    "evaluation": {"tasks": 2},
    "sampling": {"max_new_tokens": 4},
}
QA = "question,answer\n" + "".join(f"{n}+1=,{n + 1}\n" for n in range(40))
SORTING = {"environment": {"kind": "sorting"}, "algorithm": {"kind": "grpo"}}
DATASET = {"kind": "dataset", "train": "qa.csv", "columns": {"prompt": "question"}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "qa.csv").write_text(QA)
    return tmp_path


def load(folder: Path, **changes):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(BASE | changes))
    return load_config(folder / "recipe.yaml")


def write_reward(folder: Path, name: str, body: str) -> dict[str, str]:
    (folder / f"{name}.py").write_text(textwrap.dedent(body))
    return {"kind": f"{name}:reward"}


def test_what_a_recipe_names_is_opened(folder):
    report = run_preflight(
        load(
            folder,
            stages=[
                {"name": "sft", "algorithm": {"kind": "sft"}, "environment": DATASET},
                {"name": "grpo", "algorithm": {"kind": "grpo"}, "environment": {"kind": "sorting"}},
            ],
        )
    )
    text = "\n".join(report.opened)
    assert report.problems == report.warnings == []
    for expected in ("tokenizer: ", "sft: a row has ", "exact_match gives a demonstration 1.0"):
        assert expected in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": DATASET | {"train": "qu.csv"}}, "qu.csv"),
        ({"environment": DATASET | {"columns": {"prompt": "query"}}}, "query"),
        ({"model": {"path": "./models/qwn"}, "tokenizer": {"kind": "auto"}}, "models/qwn"),
    ],
)
def test_missing_files_columns_and_models_are_problems(folder, changes, message):
    config = load(folder, algorithm={"kind": "sft"}, **{"environment": DATASET, **changes})
    with pytest.raises(RatchetError, match=message):
        run_preflight(config).raise_problems()


def test_a_field_that_the_models_configuration_lacks_is_a_problem(folder):
    init_policy(get_preset("tiny", 256), 0).save(folder / "model")
    model = {"path": "model", "overrides": {"rope_thetas": 1e6}}
    config = load(folder, model=model, **SORTING)
    with pytest.raises(RatchetError, match=r"overrides\.rope_thetas: .* mean 'rope_theta'\?"):
        run_preflight(config).raise_problems()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learner": {"tensor_parallel": 3, "sequence_parallel": True}}, "set it to 2"),
        ({"overrides": {"quantization_config": {"quant_method": "mxfp4"}}}, "are quantized"),
        ({"lora": {"target_modules": ["gate_proj"]}}, r"=\[q_proj, k_proj, v_proj, o_proj\]"),
    ],
)
def test_what_megatron_lacks_for_a_model_is_a_problem(folder, changes, message):
    init_policy(get_preset("tiny", 256), 0).save(folder / "model")
    family, fields = cases.MODELS["gpt_oss"]
    overrides = changes.get("overrides", {})
    content = {"model_type": family, **cases.BASE, **fields, **overrides}
    (folder / "model" / "config.json").write_text(json.dumps(content))
    learner = {"kind": "megatron", **changes.get("learner", {})}
    lora = {"lora": changes["lora"]} if "lora" in changes else {}
    config = load(folder, model={"path": "model"}, learner=learner, **lora, **SORTING)
    with pytest.raises(RatchetError, match=message):
        run_preflight(config).raise_problems()


def test_megatron_is_asked_about_each_stage_and_about_the_backend(folder):
    init_policy(get_preset("tiny", 256), 0).save(folder / "model")
    common = {"learner": {"kind": "megatron"}, **SORTING}
    config = load(folder, model={"path": "model", "backend": "transformers"}, **common)
    with pytest.raises(RatchetError, match=r"backend is transformers\. Set model\.backend=auto"):
        run_preflight(config).raise_problems()
    family, fields = cases.MODELS["gpt_oss"]
    content = {"model_type": family, **cases.BASE, **fields}
    (folder / "model" / "config.json").write_text(json.dumps(content))
    stages = [
        {"name": "whole", "algorithm": {"kind": "sft"}},
        {"name": "adapter", "algorithm": {"kind": "sft"}, "lora": {"target_modules": ["up_proj"]}},
    ]
    config = load(folder, model={"path": "model"}, stages=stages, **common)
    with pytest.raises(RatchetError, match=r"=\[q_proj, k_proj, v_proj, o_proj\]"):
        run_preflight(config).raise_problems()


def test_the_base_of_an_adapter_is_kept_where_overrides_change_it(folder):
    sections = [{"path": "model", "overrides": fields} for fields in ({}, {"rope_theta": 1e6})]
    configs = [load(folder, model=section, lora={}, **SORTING) for section in sections]
    kept = [get_adapter_base_dir(config, 0, folder) for config in configs]
    assert kept[0] is None
    assert kept[1].parent == folder / "base"


def test_problems_of_all_stages_are_told_at_once(folder):
    reward = write_reward(folder, "wrong_signature", "def reward(answer):\n    return 1.0\n")
    broken = write_reward(folder, "broken", "def reward(trajectory, task):\n    return 1 / 0\n")
    stages = [
        {"name": "sft", "algorithm": {"kind": "sft"}, "environment": DATASET | {"train": "no.csv"}},
        {"name": "a", "algorithm": {"kind": "grpo"}, "rewards": [broken]},
    ]
    config = load(folder, environment={"kind": "sorting"}, stages=stages)
    with pytest.raises(ConfigError) as caught:
        run_preflight(config).raise_problems()
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 problems:"
    assert "stages.sft: " in lines[1]
    assert "no.csv" in lines[1]
    assert "broken:reward fails on a demonstration: ZeroDivisionError: division by zero" in lines[2]
    assert f"({folder / 'broken.py'}, line 2, in reward)" in lines[2]
    config = load(
        folder, algorithm={"kind": "grpo"}, environment={"kind": "sorting"}, rewards=[reward]
    )
    with pytest.raises(ConfigError, match="wrong_signature"):
        run_preflight(config).raise_problems()


@pytest.mark.parametrize(
    ("module", "prompt", "message"),
    [
        ("impure", "str(random.randrange(10**9))", "Drawn.sample makes another train task each"),
        ("no_text", "rng.randrange(10**6)", "Drawn.sample returned Problem.*must be text"),
    ],
)
def test_a_procedural_environment_draws_text_from_its_generator(folder, module, prompt, message):
    (folder / f"{module}.py").write_text(
        textwrap.dedent(
            f"""
            import random
            from ratchet.environments.single_turn import Problem, Procedural
            class Drawn(Procedural):
                name = "drawn"
                def sample(self, rng):
                    return Problem({prompt}, "1")
            """
        )
    )
    config = load(folder, algorithm={"kind": "grpo"}, environment={"kind": f"{module}:Drawn"})
    report = run_preflight(config)
    told = [*report.warnings, *(str(problem) for _, problem in report.problems)]
    assert any(re.search(message, line) for line in told), told


def test_a_reward_that_fails_on_a_made_up_answer_is_a_warning(folder):
    (folder / "guess.py").write_text(
        textwrap.dedent(
            """
            from ratchet.environments.single_turn import Problem, Procedural
            class Guess(Procedural):
                name = "guess"
                def sample(self, rng):
                    return Problem(str(rng.randrange(10**6)), "")
                def demonstration(self, task):
                    raise NotImplementedError
            """
        )
    )
    reward = write_reward(folder, "strict", "def reward(trajectory, task):\n    raise KeyError\n")
    config = load(
        folder, algorithm={"kind": "grpo"}, environment={"kind": "guess:Guess"}, rewards=[reward]
    )
    report = run_preflight(config)
    assert report.problems == []
    assert "fails on the answer '0': KeyError" in report.warnings[0]


def test_a_run_that_can_not_begin_leaves_no_directory(folder):
    load(folder, algorithm={"kind": "sft"}, environment=DATASET | {"train": "no.csv"})
    with pytest.raises(RatchetError, match=r"no\.csv"):
        start_run(folder / "recipe.yaml", [], None, command="ratchet train")
    assert not (folder / "runs").exists()
    assert WRONG_INPUT == 2


def test_a_traceback_becomes_the_users_last_frame():
    text = (
        "Traceback (most recent call last):\n"
        '  File "/x/site-packages/lib.py", line 3, in call\n    f()\n'
        '  File "/project/mine.py", line 7, in reward\n    return int("x")\n'
        "ValueError: invalid literal\n"
    )
    described = "ValueError: invalid literal (/project/mine.py, line 7, in reward)"
    assert describe_user_error(text) == described
    assert describe_user_error("the server is down") == "the server is down"


def test_usual_columns_and_plain_text_need_no_columns(folder):
    (folder / "text.jsonl").write_text('{"text": "some words"}\n' * 4)
    data = {"kind": "dataset", "train": "qa.csv"}
    stages = [
        {"name": "qa", "algorithm": {"kind": "sft"}, "environment": data},
        {
            "name": "text",
            "algorithm": {"kind": "sft"},
            "environment": data | {"train": "text.jsonl"},
            "evaluation": {"tasks": 0},
        },
    ]
    report = run_preflight(load(folder, stages=stages))
    assert report.problems == report.warnings == []
    text = "\n".join(report.opened)
    assert "text: a row has " in text
    stages[1]["algorithm"] = {"kind": "grpo"}
    stages[1]["rewards"] = [{"kind": "exact_match"}]
    with pytest.raises(RatchetError, match="plain text without a prompt"):
        run_preflight(load(folder, stages=stages)).raise_problems()


def test_an_unusable_row_of_the_evaluation_alone_is_a_problem(folder):
    (folder / "test.csv").write_text("question,answer\n1+100=,101\n,102\n")
    held_out = {"kind": "dataset", "test": "test.csv"}
    evaluation = {"tasks": 2, "environment": held_out}
    settings = {"algorithm": {"kind": "sft"}, "environment": DATASET, "evaluation": evaluation}
    with pytest.raises(RatchetError, match=r"test\.csv, line 3"):
        run_preflight(load(folder, **settings)).raise_problems()


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_held_out_rows_without_answers_are_told_as_in_a_run(folder, kind):
    (folder / "prompts.csv").write_text("question\n1+100=\n2+100=\n")
    pairs = '{{"prompt": "{0}", "chosen": "{0}a", "rejected": "{0}b"}}\n'
    (folder / "pairs.jsonl").write_text("".join(pairs.format(n) for n in range(4)))
    train = "pairs.jsonl" if kind == "dpo" else "qa.csv"
    held_out = {"kind": "dataset", "train": "qa.csv", "test": "prompts.csv"}
    config = load(
        folder,
        device="cpu",
        algorithm={"kind": kind},
        environment={"kind": "dataset", "train": train},
        evaluation={"tasks": 2, "environment": held_out},
    )
    problem = r"of held-out answers, but there are none \(.*prompts.csv.*evaluation.tasks=0"
    with pytest.raises(ConfigError, match=problem):
        run_preflight(config).raise_problems()
    with pytest.raises(ConfigError, match=problem):
        build_run(config, 0, build_policy(config))


@pytest.mark.parametrize("where", ["__init__", "reset"])
def test_an_environment_that_exits_is_a_problem(folder, where):
    """With status 0 a recipe that can't run would seem to be checked."""
    module = f"leaving_{where.strip('_')}"  # of its own: modules stay loaded
    (folder / f"{module}.py").write_text(
        textwrap.dedent(
            f"""
            import sys
            from ratchet.environments.toy.arithmetic import Arithmetic, ArithmeticConfig

            class Config(ArithmeticConfig):
                builds = "{module}:Leaving"

            class Leaving(Arithmetic):
                {"async " if where == "reset" else ""}def {where}(self, *arguments):
                    sys.exit(0)
            """
        )
    )
    report = run_preflight(
        load(folder, algorithm={"kind": "grpo"}, environment={"kind": f"{module}:Config"})
    )
    with pytest.raises(ConfigError, match=rf"SystemExit: 0 \(.*{module}.py, line 10, in {where}\)"):
        report.raise_problems()


@pytest.mark.parametrize(
    ("method", "body", "message"),
    [
        (
            "reset",
            "async def reset(self, task): return None",
            r"^stages\.grpo: Odd\.reset returned None\. It must be a sequence",
        ),
        (
            "plain_close",
            "def close(self): pass",
            r"^stages\.grpo: Odd\.close is not async\. Write `async def close`",
        ),
        (
            "hanging_close",
            "async def close(self): await asyncio.Event().wait()",
            r"^stages\.grpo: Odd\.close has not ended after 0\.02 s",
        ),
        (
            "stubborn_close",
            "async def close(self): await wait()",
            r"^stages\.grpo: Odd\.close has not ended after 0\.02 s",
        ),
        (
            "stubborn_reset",
            "async def reset(self, task): await wait()",
            r"^Odd\.reset returned nothing within 0\.02 s",
        ),
    ],
)
def test_odd_methods_of_an_environment_are_problems(folder, monkeypatch, method, body, message):
    monkeypatch.setattr("ratchet.experience.rollout.environment_answers.CLOSE_TIMEOUT_S", 0.02)
    monkeypatch.setattr("ratchet.training.preflight.RESET_TIMEOUT_S", 0.02)
    monkeypatch.setattr("ratchet.utils.user_code.STOP_S", 0.01)
    monkeypatch.setattr("ratchet.executors.event_loop.END_S", 0.01)
    module = f"odd_{method}"  # of its own: modules stay loaded
    (folder / f"{module}.py").write_text(
        textwrap.dedent(
            f"""
            import asyncio
            from contextlib import suppress
            from ratchet.environments.toy.arithmetic import Arithmetic, ArithmeticConfig

            async def wait():
                while True:
                    with suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()

            class Config(ArithmeticConfig):
                builds = "{module}:Odd"

            class Odd(Arithmetic):
                {body}
            """
        )
    )
    report = run_preflight(
        load(folder, algorithm={"kind": "grpo"}, environment={"kind": f"{module}:Config"})
    )
    with pytest.raises(ConfigError, match=message):
        report.raise_problems()


def test_a_reward_that_catches_its_cancellation_is_left(monkeypatch):
    monkeypatch.setattr("ratchet.training.preflight.JUDGE_TIMEOUT_S", 0.02)
    monkeypatch.setattr("ratchet.utils.user_code.STOP_S", 0.01)
    monkeypatch.setattr("ratchet.executors.event_loop.END_S", 0.01)

    class Stubborn(Reward):
        async def score(self, trajectories, task):
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

    task = Task("1", ())
    with pytest.raises(ConfigError, match=r"Stubborn\.score returned nothing within 0\.02 s"):
        run_event_loop(_score(Stubborn(), answered(task, "1"), task))


def test_every_environment_that_is_reset_is_closed(folder):
    (folder / "counted.py").write_text(
        textwrap.dedent(
            """
            from ratchet.environments.toy.arithmetic import Arithmetic, ArithmeticConfig

            class Config(ArithmeticConfig):
                builds = "counted:Counted"

            OPEN = []

            class Counted(Arithmetic):
                async def reset(self, task):
                    OPEN.append(self)
                    return await super().reset(task)

                async def close(self):
                    if self in OPEN:
                        OPEN.remove(self)
            """
        )
    )
    run_preflight(load(folder, algorithm={"kind": "grpo"}, environment={"kind": "counted:Config"}))
    import counted  # pyright: ignore[reportMissingImports]

    assert counted.OPEN == []


def test_tool_calls_that_can_not_be_read_are_a_problem(folder):
    environment = {
        "kind": "tool_use",
        "problems": {"kind": "arithmetic"},
        "tools": [{"kind": "calculator"}],
    }
    algorithm, tokenizer = {"kind": "grpo"}, {"kind": "characters"}
    config = load(folder, algorithm=algorithm, environment=environment, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="tool_format"):
        run_preflight(config).raise_problems()


def test_raw_observations_need_the_turns_that_a_window_drops(folder):
    (folder / "raw.py").write_text(
        textwrap.dedent(
            """
            from ratchet.environments.toy.arithmetic import Arithmetic, ArithmeticConfig

            class Config(ArithmeticConfig):
                builds = "raw:Raw"

            class Raw(Arithmetic):
                raw_observations = True
            """
        )
    )
    keys = {"algorithm": {"kind": "grpo"}, "rollouts": {"history_window": 2}}
    report = run_preflight(load(folder, environment={"kind": "raw:Config"}, **keys))
    with pytest.raises(ConfigError, match=r"remove rollouts\.history_window"):
        report.raise_problems()


def test_a_filter_that_can_t_be_built_is_a_problem(folder):
    (folder / "bad.py").write_text("class Filter:\n    def __init__(self):\n        int('a')\n")
    rollouts = {"group_filter": {"kind": "bad:Filter"}}
    environment = {"kind": "sorting"}
    report = run_preflight(
        load(folder, environment=environment, algorithm={"kind": "grpo"}, rollouts=rollouts)
    )
    message = r"rollouts\.group_filter: ValueError: invalid literal.*bad\.py"
    with pytest.raises(ConfigError, match=message):
        report.raise_problems()


def test_tags_of_effort_that_no_task_has_are_refused(folder):
    def check(environment, *tags):
        shaping = [{"kind": "effort_length", "max_length": 9, "tags": tags}]
        algorithm = {"kind": "grpo", "shaping": shaping}
        rewards = [{"kind": "exact_match"}]
        recipe = load(folder, algorithm=algorithm, environment=environment, rewards=rewards)
        report = run_preflight(recipe)
        return [str(problem) for _, problem in report.problems] + report.warnings

    arithmetic, sorting = ({"kind": kind} for kind in ("arithmetic", "sorting"))
    mixture = {"kind": "mixture", "parts": [{**arithmetic, "tag": "low"}, {**sorting, "weight": 9}]}
    assert check(mixture, "low") == check(mixture, "sorting", "low") == check(arithmetic) == []
    (problem,) = check(mixture, "low", "hgih")
    assert "effort_length.tags has hgih, and the tasks have low, sorting" in problem
    (problem,) = check(DATASET, "high")
    assert "effort_length.tags has high, and the tasks have dataset: name these" in problem
    # A later task of an endless stream may have the tag.
    (warning,) = check(arithmetic, "low")
    assert "effort_length.tags has low, and the first 1,000 tasks have arithmetic:" in warning
