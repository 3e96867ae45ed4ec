import subprocess
import sys
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.config.base import Section
from ratchet.config.diagnostics import REDACTED
from ratchet.config.experience import SamplingConfig
from ratchet.config.loader import dump_config, load_config
from ratchet.config.outputs import CheckpointConfig
from ratchet.config.schema import EvaluationConfig, RunConfig
from ratchet.config.yaml_tree import read_text, write_text
from ratchet.errors import ConfigError

QUICKSTART = """\
name: quickstart
seed: 0
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: sorting, digits: 8}
stages:
  - {name: sft, algorithm: {kind: sft}, steps: 90, batch_size: 128, optimizer: {lr: 1e-3, warmup_steps: 20}}
  - name: grpo
    algorithm: {kind: grpo, group_size: 8}
    steps: 200
    batch_size: 128
    sampling: {temperature: 0.5, max_new_tokens: 9}
    optimizer: {lr: 8e-4, betas: [0.9, 0.99], warmup_steps: 10, schedule: linear, min_lr_ratio: 0.1}
"""
SINGLE = """\
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: sorting}
algorithm: {kind: grpo}
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return write


def refusal(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


# --- what a recipe resolves to


def test_quickstart_resolves(write):
    config = load_config(write(QUICKSTART))
    sft, grpo = config.stages
    assert (config.name, config.seed, config.device, config.threads, config.run_dir) == (
        "quickstart",
        0,
        "auto",
        "auto",
        None,
    )
    assert (config.model.preset, config.model.backend) == ("tiny", "auto")
    assert (config.logging.tensorboard, config.logging.progress) == ("auto", "auto")
    assert (sft.name, sft.source, sft.algorithm.n_attempts, sft.steps, sft.batch_size) == (
        "sft",
        "rows",
        1,
        90,
        128,
    )
    assert (grpo.name, grpo.source, grpo.algorithm.n_attempts, grpo.steps, grpo.batch_size) == (
        "grpo",
        "rollouts",
        8,
        200,
        128,
    )
    assert (sft.optimizer.lr, sft.optimizer.warmup_steps, sft.optimizer.schedule) == (
        1e-3,
        20,
        "constant",
    )
    assert (grpo.optimizer.lr, grpo.optimizer.betas, grpo.optimizer.min_lr_ratio) == (
        8e-4,
        (0.9, 0.99),
        0.1,
    )
    assert grpo.sampling == SamplingConfig(temperature=0.5, max_new_tokens=9)
    assert sft.sampling == SamplingConfig()
    for stage in config.stages:
        assert (stage.environment.kind, stage.environment.digits) == ("sorting", 8)
        assert [(reward.kind, reward.weight) for reward in stage.rewards] == [("exact_match", 1.0)]
        assert stage.eval_rewards == stage.rewards
        assert stage.evaluation == EvaluationConfig()
        assert stage.checkpoint == CheckpointConfig()
        assert (stage.learner.kind, stage.learner.micro_batch_tokens, stage.generator.kind) == (
            "local",
            "auto",
            "engine",
        )
    algorithm = grpo.algorithm
    assert (
        algorithm.advantage.scale,
        algorithm.loss.clip_low,
        algorithm.loss.clip_high,
        algorithm.kl.coef,
    ) == (
        "std",
        0.2,
        0.2,
        0.0,
    )
    assert (algorithm.weighting, algorithm.minibatches, algorithm.epochs) == ("sequence_mean", 1, 1)


def test_without_stages_there_is_one_called_after_its_algorithm(write):
    config = load_config(write(SINGLE, "my recipe.yaml"))
    assert config.name == "my-recipe"
    assert [stage.name for stage in config.stages] == ["grpo"]


def test_defaults_at_the_top_reach_every_stage_and_stages_win(write):
    config = load_config(
        write("""
        model: {preset: tiny}
        tokenizer: {kind: characters}
        environment: {kind: sorting, digits: 3}
        algorithm: {kind: grpo, group_size: 4, loss: {clip_high: 0.3}}
        optimizer: {lr: 1e-4, warmup_steps: 5}
        stages:
          - {algorithm: {kind: sft}}
          - {algorithm: {group_size: 6}, optimizer: {lr: 1e-5}, environment: {kind: arithmetic}}
        """)
    )
    sft, grpo = config.stages
    # another kind replaces
    assert (sft.name, sft.algorithm.kind, sft.environment.digits) == ("sft", "sft", 3)
    # the same joins
    assert (grpo.name, grpo.algorithm.group_size, grpo.algorithm.loss.clip_high) == ("grpo", 6, 0.3)
    assert grpo.environment.kind == "arithmetic"
    assert grpo.environment.digits == 2  # the default of arithmetic, not the 3 of sorting
    assert (sft.optimizer.lr, grpo.optimizer.lr, grpo.optimizer.warmup_steps) == (1e-4, 1e-5, 5)


def test_evaluation_is_judged_by_the_environments_own_reward_whatever_shapes_training(write):
    path = write(
        SINGLE + "rewards: [{kind: countdown, weight: 2, partial: 0.1}, {kind: exact_match}]\n"
    )
    stage = load_config(path).stages[0]
    assert [(r.kind, r.weight) for r in stage.rewards] == [("countdown", 2.0), ("exact_match", 1.0)]
    assert [r.kind for r in stage.eval_rewards] == ["exact_match"]


@pytest.mark.parametrize(
    "text",
    [QUICKSTART, SINGLE, SINGLE + "name: '1e-3'\nsampling: {stop: ['off', '010', '12:30', '~']}\n"],
)
def test_a_resolved_config_loads_to_an_equal_object(write, text):
    config = load_config(write(text))
    again = load_config(write(dump_config(config), "config.yaml"))
    assert again == config
    assert dump_config(again) == dump_config(config)


def test_equality_sees_every_leaf(write):
    path = write(SINGLE)
    assert load_config(path) != load_config(path, ["environment.digits=9"])
    assert load_config(path) != load_config(path, ["learner.max_bad_steps=9"])


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["C"])),
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"\A[a-z_]{1,6}\Z"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"\A[a-z_]{1,6}\Z"), trees, min_size=1, max_size=4))
def test_whatever_is_written_is_read_back(values):
    root, problems = read_text(write_text(values), "x")
    assert root.plain() == values
    assert problems == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-1E+5", -1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 10),
        ("12:30", "12:30"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("~", None),
        ("2026-01-01", "2026-01-01"),
        ("'1'", "1"),
        ("-.inf", float("-inf")),
        ("1e", "1e"),
        ("-", [None]),
    ],
)
def test_scalars_mean_what_they_look_like(text, value):
    assert read_text(f"key:\n  {text}", "x")[0].plain() == {"key": value}


def test_anchors_and_merge_keys(write):
    config = load_config(
        write(
            SINGLE
            + dedent("""\
            stages:
              - {name: a, optimizer: &o {lr: 1e-4, eps: 1e-7}}
              - {name: b, optimizer: {<<: *o, lr: 1e-5}}
            """)
        )
    )
    assert [(s.optimizer.lr, s.optimizer.eps) for s in config.stages] == [
        (1e-4, 1e-7),
        (1e-5, 1e-7),
    ]


# --- extends


def test_extends_starts_from_another_recipe(write):
    write(QUICKSTART, "base/quick.yaml")
    path = write(
        "extends: ../base/quick.yaml\nseed: 3\nevaluation: {tasks: 64}\nstages: {grpo: {steps: "
        "30}}\n",
        "mine/x.yaml",
    )
    config = load_config(path)
    assert (config.name, config.seed) == ("x", 3)  # a variant is another run
    assert [stage.evaluation.tasks for stage in config.stages] == [64, 64]
    assert [stage.steps for stage in config.stages] == [90, 30]
    assert config.stages[1].optimizer.lr == 8e-4


def test_a_list_of_stages_replaces_the_inherited_one(write):
    write(QUICKSTART, "quick.yaml")
    config = load_config(write("extends: quick.yaml\nstages: [{algorithm: {kind: grpo}}]\n"))
    assert [(s.name, s.steps, s.environment.digits) for s in config.stages] == [("grpo", 100, 8)]


def test_another_kind_drops_the_inherited_keys(write):
    write(SINGLE.replace("{kind: sorting}", "{kind: sorting, digits: 7}"), "base.yaml")
    stage = load_config(write("extends: base.yaml\nenvironment: {kind: arithmetic}\n")).stages[0]
    assert (stage.environment.kind, stage.environment.digits) == ("arithmetic", 2)
    stage = load_config(write("extends: base.yaml\nenvironment: {kind: sorting}\n")).stages[0]
    assert stage.environment.digits == 7


def test_a_circle_of_extends_is_refused(write):
    write("extends: b.yaml\n", "a.yaml")
    assert "extend each other in a circle: a.yaml -> b.yaml -> a.yaml" in refusal(
        write("extends: a.yaml\n", "b.yaml").with_name("a.yaml")
    )


def test_a_default_that_inherited_stages_set_themselves_is_refused(write):
    write(QUICKSTART, "quick.yaml")
    message = refusal(write("extends: quick.yaml\nsteps: 7\n"))
    assert message.endswith(
        "recipe.yaml:2: steps: has no effect, because the stages set it themselves: set stages.sft.steps or stages.grpo.steps instead"
    )


def test_a_problem_in_the_base_is_told_with_its_own_file_and_line(write):
    write(QUICKSTART.replace("lr: 1e-3", "lr: -1"), "quick.yaml")
    message = refusal(write("extends: quick.yaml\n\nseed: -1\n"))
    assert message.startswith("2 problems:")
    assert "quick.yaml:7: stages.sft.optimizer.lr: -1 must be more than 0" in message
    assert "recipe.yaml:3: seed: -1 must be at least 0" in message


# --- overrides


def test_overrides_by_name_position_and_yaml_value(write):
    path = write(QUICKSTART)
    config = load_config(
        path,
        [
            "seed=5",
            "stages.grpo.steps=20",
            "stages.0.steps=30",
            "stages.1.optimizer.betas.1=0.95",
            "evaluation={tasks: 8}",
        ],
    )
    assert (config.seed, config.stages[0].steps, config.stages[1].steps) == (5, 30, 20)
    assert config.stages[1].optimizer.betas == (0.9, 0.95)
    assert config.stages[0].evaluation.tasks == 8


def test_a_single_stage_answers_to_its_name_and_to_the_top(write):
    path = write(SINGLE)
    for override in ("steps=7", "stages.grpo.steps=7", "stages.0.steps=7"):
        assert load_config(path, [override]).stages[0].steps == 7
    assert "stages.sft: there is no 'sft' here; there are grpo" in refusal(
        path, ["stages.sft.steps=7"]
    )


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_overrides_means_nothing(write, order):
    texts = [
        "environment.kind=arithmetic",
        "environment.digits=5",
        "learner.kind=dtensor",  # another kind than the default
        "learner.dp_shard=2",
    ][::order]
    path = write(SINGLE.replace("{kind: sorting}", "{kind: sorting, digits: 7}"))
    stage = load_config(path, texts).stages[0]
    assert (stage.environment.kind, stage.environment.digits) == ("arithmetic", 5)
    assert (stage.learner.kind, stage.learner.dp_shard) == ("dtensor", 2)


@pytest.mark.parametrize("order", [1, -1])
def test_overrides_of_items_join_a_list_that_is_an_override_too(write, order):
    """The default kind of a learner is local, which has no dp_shard."""
    texts = [
        "stages=[{name: a, algorithm: {kind: grpo}, steps: 1, learner: {dp_shard: 2}}]",
        "stages.0.learner.kind=dtensor",
        "stages.a.steps=7",
        "rewards=[{kind: math}]",
        "rewards.0.weight=0.5",
    ][::order]
    stage = load_config(write(SINGLE), texts).stages[0]
    assert (stage.learner.kind, stage.learner.dp_shard, stage.steps) == ("dtensor", 2, 7)
    assert [(reward.kind, reward.weight) for reward in stage.rewards] == [("math", 0.5)]


def test_the_last_of_two_overrides_of_one_key_wins(write):
    assert load_config(write(SINGLE), ["seed=1", "seed=2"]).seed == 2


def test_overrides_of_rewards_by_position(write):
    path = write(SINGLE + "rewards: [{kind: exact_match}, {kind: countdown}]\n")
    assert [r.weight for r in load_config(path, ["rewards.1.weight=0.5"]).stages[0].rewards] == [
        1.0,
        0.5,
    ]


def test_null_switches_off_what_may_be_off(write):
    assert (
        load_config(write(SINGLE), ["optimizer.max_grad_norm=null"])
        .stages[0]
        .optimizer.max_grad_norm
        is None
    )


# --- files


def test_files_that_are_no_recipe(write, tmp_path):
    assert "is empty: a recipe needs" in refusal(write("# nothing\n"))
    assert "must hold keys and values (`model: ...`), not a list" in refusal(write("- 1\n"))
    assert "not a single value" in refusal(write("words\n"))
    assert "recipe.yaml:2, column 2: is not YAML: expected ',' or ']', but got ':'" in refusal(
        write("a: [1\nb: 2\n")
    )
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: caf\xe9\n")
    assert (
        "latin.yaml is not UTF-8 text: byte 0xe9 at offset 9, in line 1: save it as UTF-8"
        in refusal(latin)
    )
    assert "is a directory" in refusal(tmp_path)
    assert "an anchor contains itself" in refusal(write("a: &x {b: *x}\n"))


def test_a_missing_file_names_one_nearby(write, tmp_path):
    path = write(QUICKSTART, "quickstart.yaml")
    assert refusal(tmp_path / "quikstart.yaml").endswith(f"quikstart.yaml: did you mean {path}?")
    assert refusal(tmp_path / "quickstart").endswith(f"did you mean {path}?")
    assert "there is no directory" in refusal(tmp_path / "absent" / "x.yaml")
    write("extends: quickstrt.yaml\n", "variant.yaml")
    assert (
        f"variant.yaml:1: extends: there is no recipe {tmp_path / 'quickstrt.yaml'}: did you mean "
        f"{path}?" in refusal(tmp_path / "variant.yaml")
    )


# --- secrets and imports


class Hosted(Section):
    builds = "json:loads"
    api_key: str = ""
    stop_tokens: int = 1


@pytest.mark.fault("S7")
def test_secrets_are_redacted_in_a_saved_config(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "hosted_for_test", type(sys)("hosted_for_test"))
    sys.modules["hosted_for_test"].Hosted = Hosted
    text = SINGLE.replace(
        "{kind: sorting}", "{kind: 'hosted_for_test:Hosted', api_key: s3cret, stop_tokens: 4}"
    )
    dumped = dump_config(load_config(write(text)))
    assert "s3cret" not in dumped
    assert REDACTED in dumped
    assert "stop_tokens: 4" in dumped
    message = refusal(write(text.replace("s3cret", "12345678")))
    assert "12345678" not in message
    assert "must be text" in message


@pytest.mark.slow
def test_reading_and_checking_a_recipe_imports_neither_torch_nor_transformers(write):
    path = write(QUICKSTART)
    code = (
        "import sys; from ratchet.commands.describe_recipe import describe; from ratchet.config.loader "
        "import dump_config, load_config; "
        "from ratchet.config.key_paths import leaf_keys; from ratchet.config.schema import "
        "RunConfig; "
        "from ratchet.errors import ConfigError\n"
        f"config = load_config({str(path)!r}); describe(config); dump_config(config)\n"
        "assert 'numpy' not in sys.modules  # every command would wait for it\n"
        "leaf_keys(RunConfig)\n"
        f"try: load_config({str(path)!r}, ['group_sise=3'])\n"
        "except ConfigError: pass\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_config_can_be_made_in_python():
    from ratchet.algorithms.config.sft import SFTConfig
    from ratchet.environments.toy.sorting import SortingConfig

    stage = {
        "name": "sft",
        "algorithm": SFTConfig(epochs=2),
        "environment": SortingConfig(digits=3),
        "evaluation": {"tasks": 4},
    }
    config = RunConfig(model={"preset": "tiny"}, tokenizer={"kind": "bytes"}, stages=[stage])
    assert (config.stages[0].environment.kind, config.stages[0].environment.digits) == (
        "sorting",
        3,
    )
    assert "{kind: sorting, digits: 3}" in dump_config(config)


DATA = """\
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: dataset, train: qa.csv, columns: {prompt: q}, test_share: 0.2}
algorithm: {kind: grpo}
rewards: [{kind: exact_match}]
"""


def test_a_preset_drops_the_files_and_columns_of_the_recipe_below(write):
    path = write(DATA)
    config = load_config(path, ["environment={kind: dataset, preset: gsm8k}"])
    environment = config.stages[0].environment
    assert (environment.preset, environment.train, environment.columns) == ("gsm8k", (), {})
    assert environment.test_share == 0.2
    more = write(
        "extends: recipe.yaml\nenvironment: {preset: gsm8k, train: mine.csv}\n", "more.yaml"
    )
    environment = load_config(more, ["environment.preset=hh_rlhf"]).stages[0].environment
    assert [str(file) for file in environment.train] == ["mine.csv"]


def test_workers_hold_the_engine_by_default(write):
    config = load_config(write(SINGLE), ["generator={kind: workers, workers: 2}"])
    assert config.stages[0].generator.worker.kind == "engine"


def test_a_teacher_given_as_a_path_section_says_what_to_write(write):
    path = write("""\
        model: {preset: tiny}
        tokenizer: {kind: characters}
        environment: {kind: sorting}
        algorithm: {kind: distill_on_policy, teacher: {path: models/large}}
        """)
    text = refusal(path)
    assert "algorithm.teacher: a map names a model for each task tag" in text
    assert "Write the directory alone: teacher=models/large" in text
