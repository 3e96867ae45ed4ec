"""Recipes that are wrong, each with what its user is told."""

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet.config.loader import load_config
from ratchet.errors import ConfigError

BASE = {
    "model": "{preset: tiny}",
    "tokenizer": "{kind: characters}",
    "environment": "{kind: sorting}",
    "algorithm": "{kind: grpo}",
}


@pytest.fixture
def refusal(tmp_path):
    def refusal(changes, overrides=()):
        """Message for BASE with some keys replaced (None removes one); keys stand in the lines 1,
        2, ..."""
        lines = [
            f"{key}: {value}" for key, value in {**BASE, **changes}.items() if value is not None
        ]
        path = tmp_path / "r.yaml"
        path.write_text("\n".join(lines), encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        return str(caught.value).replace(f"{path}:", "line ")

    return refusal


UNKNOWN_KEYS = [
    ({"optimiser": "{lr: 1}"}, "line 5: optimiser: unknown key; did you mean 'optimizer'?"),
    ({"optimizer": "{lrr: 1}"}, "line 5: optimizer.lrr: unknown key; did you mean 'lr'?"),
    (
        {"algorithm": "{kind: grpo, group_sise: 4}"},
        "line 4: algorithm.group_sise: unknown key; did you mean 'group_size'?",
    ),
    (
        {"environment": "{kind: sorting, digit: 4}"},
        "line 3: environment.digit: unknown key; did you mean 'digits'?",
    ),
    ({"lr": "1e-3"}, "line 5: lr: unknown key; it belongs in 'optimizer.lr'"),
    ({"group_size": "4"}, "line 5: group_size: unknown key; it belongs in 'algorithm.group_size'"),
    ({"grup_size": "4"}, "line 5: grup_size: unknown key; did you mean 'algorithm.group_size'?"),
    ({"preset": "tiny"}, "line 5: preset: unknown key; it belongs in 'model.preset'"),
    ({"sampling": "{lr: 1}"}, "line 5: sampling.lr: unknown key; it belongs in 'optimizer.lr'"),
    ({"optimizer": "{seed: 1}"}, "line 5: optimizer.seed: unknown key; it belongs in 'seed'"),
    (
        {"sampling": "{temperatur: 1}"},
        "line 5: sampling.temperatur: unknown key; did you mean 'temperature'?",
    ),
    (
        {"algorithm": "{kind: sft, group_size: 4}"},
        "algorithm.group_size: unknown key; only these kinds have it: cispo, dapo",
    ),
    (
        {"logging": "{zzz: 1}"},
        "line 5: logging.zzz: unknown key; known here: tensorboard, sinks, progress",
    ),
    (
        {"rewards": "[{kind: exact_match, wieght: 2}]"},
        "line 5: rewards.0.wieght: unknown key; did you mean 'weight'?",
    ),
    (
        {"rewards": "[{kind: countdown}, {kind: exact_match, partial: 0.1}]"},
        "rewards.1.partial: unknown key; only these kinds have it: countdown",
    ),
    (
        {"stages": "[{name: a, setps: 3}]"},
        "line 5: stages.a.setps: unknown key; did you mean 'steps'?",
    ),
]

WRONG_VALUES = [
    ({"optimizer": '{lr: "1e-5x"}'}, "line 5: optimizer.lr: '1e-5x' must be a number"),
    ({"optimizer": '{lr: "1e-5"}'}, "line 5: optimizer.lr: '1e-5' must be a number"),
    ({"optimizer": "{lr: .inf}"}, "line 5: optimizer.lr: inf must be a finite number"),
    ({"optimizer": "{lr: 0}"}, "line 5: optimizer.lr: 0 must be more than 0"),
    ({"optimizer": "{betas: [0.9]}"}, "line 5: optimizer.betas"),
    ({"optimizer": "{betas: [0.9, 1]}"}, "line 5: optimizer.betas.1: 1 must be less than 1"),
    ({"optimizer": "{betas: [0.9, true]}"}, "line 5: optimizer.betas: item 1 must be a number"),
    (
        {"optimizer": "{schedule: cosin}"},
        "optimizer.schedule: 'cosin' must be 'constant', 'linear', 'cosine' or 'wsd'; did you mean "
        "'cosine'?",
    ),
    ({"optimizer": None, "batch_size": "-4"}, "line 5: batch_size: -4 must be at least 1"),
    ({"steps": "true"}, "line 5: steps: true must be a whole number"),
    ({"steps": "1.5"}, "line 5: steps: 1.5 must be a whole number"),
    ({"steps": "many"}, "line 5: steps: 'many' must be a whole number"),
    ({"threads": "0"}, "line 5: threads: 0 must be at least 1 or 'auto'"),
    ({"device": "gpu"}, "line 5: device: 'gpu' must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"),
    ({"name": "a/b"}, "line 5: name: 'a/b' must be of letters, digits"),
    ({"name": "../../x"}, "line 5: name: '../../x' must be of letters, digits"),
    (
        {"optimizer": ""},
        "line 5: optimizer: null must be a section with its kind, such as {kind: adamw}",
    ),
    ({"model": "tiny"}, "line 1: model: 'tiny' must be a section: keys and values"),
    (
        {"algorithm": "grpo"},
        "line 4: algorithm: 'grpo' must be a section with its kind, such as {kind: grpo}",
    ),
    (
        {"algorithm": "{kind: grpoo}"},
        "line 4: algorithm.kind: 'grpoo' is unknown: did you mean 'grpo'? the kinds are sft, "
        "policy_gradient, grpo",
    ),
    (
        {"algorithm": "{group_size: 4}"},
        "line 4: algorithm.kind: is missing; set it to one of sft, policy_gradient, grpo",
    ),
    ({"algorithm": None}, "algorithm: is missing (Algorithm that turns a batch into an update)"),
    (
        {"environment": None},
        "environment: is missing (Environment with the tasks and demonstrations)",
    ),
    (
        {"environment": "{kind: gsm8k}"},
        "line 3: environment.train: is missing (A file, or an address in an object store)",
    ),
    ({"environment": "{kind: 5}"}, "line 3: environment.kind: 5 is not a name"),
    (
        {"environment": "{kind: 'no_such.maze:Maze'}"},
        "environment.kind: 'no_such.maze:Maze' can't be imported (ModuleNotFoundError",
    ),
    (
        {"environment": "{kind: 'ratchet.types:Tsk'}"},
        "module ratchet.types has no 'Tsk'; did you mean 'ratchet.types:Task'?",
    ),
    (
        {"environment": "{kind: ratchet.types.Task}"},
        "name a class of your own by its path, my_pkg.module:Class (did you mean ratchet.types:Task?)",
    ),
    (
        {"rewards": "{kind: exact_match}"},
        "line 5: rewards: must be a list of sections, each with its kind",
    ),
    (
        {"rewards": "[exact_match]"},
        "line 5: rewards.0: 'exact_match' must be a section with its kind, such as {kind: exact_match}",
    ),
    (
        {"rewards": "[{kind: countdown, partial: 3}]"},
        "line 5: rewards.0.partial: 3 must be less than 1",
    ),
    ({"stages": "[]"}, "line 5: stages: is empty"),
    ({"stages": "3"}, "line 5: stages: 3 must be a list"),
    (
        {"stages": "[{name: a}, {name: a}]"},
        "line 5: stages: two stages are called 'a': give each a name of its own",
    ),
    ({"stages": "[{name: 1a}]"}, "'1a' must be of letters"),
]

CLASHES = [
    (
        {"algorithm": "{kind: grpo, group_size: 1}"},
        "line 4: algorithm: group_size=1 makes every advantage 0",
    ),
    (
        {"algorithm": "{kind: grpo, weighting: fixed_length}"},
        "weighting=fixed_length needs fixed_length",
    ),
    (
        {"algorithm": "{kind: grpo, fixed_length: 5}"},
        "fixed_length=5 is not read with weighting=sequence_mean",
    ),
    (
        {"algorithm": "{kind: grpo, kl: {coef: 0.1, objective: forward, estimator: k1}}"},
        "set estimator=k3",
    ),
    (
        {"algorithm": "{kind: grpo, loss: {clip_low: 1}}"},
        "line 4: algorithm.loss.clip_low: 1 must be less than 1",
    ),
    (
        {"algorithm": "{kind: grpo, minibatches: 4}", "batch_size": "2"},
        "line 4: algorithm.minibatches: batch_size=2 groups can't be split into "
        "algorithm.minibatches=4: "
        "set algorithm.minibatches to 2 or less",
    ),
    (
        {"sampling": "{temperature: 0}"},
        "line 5: sampling.temperature: sampling.temperature=0 makes the 8 attempts of a group equal",
    ),
    (
        {"sampling": "{top_p: 0.9}"},
        "sampling.top_p=0.9 truncates the distribution",
    ),
    (
        {"sampling": "{top_k: 5}"},
        "needs a rollout correction in algorithm grpo: set sampling.top_k=0, or algorithm.correction",
    ),
    ({"sampling": "{min_p: 0.1}"}, "set sampling.min_p=0"),
    ({"sampling": "{structured: {regex: '(a'}}"}, "the regular expression can't be followed"),
    ({"sampling": "{structured: {re: a}}"}, "has the keys re, not exactly one of json"),
    (
        {"sampling": "{structured: {regex: a}}", "generator": "{kind: vllm}"},
        "generator vllm does not return the tokens that the grammar allows",
    ),
    (
        {
            "optimizer": "{warmup_steps: 30}",
            "steps": "10",
            "algorithm": "{kind: grpo, minibatches: 2}",
        },
        "optimizer.warmup_steps=30 is more than the stage's 20 optimizer steps (steps=10 x "
        "minibatches=2 x epochs=1)",
    ),
    (
        {"optimizer": "{schedule: wsd, warmup_steps: 4, decay_steps: 7}", "steps": "10"},
        "optimizer.warmup_steps=4 and decay_steps=7 together are more than the stage's 10 "
        "optimizer steps: lower one",
    ),
    (
        {"optimizer": "{schedule: wsd}", "steps": "50"},
        "never decays: set optimizer.decay_steps=10 (a fifth of the stage's 50",
    ),
    (
        {"optimizer": "{decay_steps: 5}"},
        "optimizer.decay_steps=5 is not read with optimizer.schedule=constant",
    ),
    (
        {"optimizer": "{min_lr_ratio: 0.1}"},
        "optimizer.min_lr_ratio=0.1 is not read with optimizer.schedule=constant",
    ),
    ({"model": None}, "neither model.preset nor model.path is set"),
    (
        {"model": "{preset: tiny, path: x}"},
        "model.preset=tiny and model.path=x both name a model: remove one",
    ),
    (
        {"model": "{preset: tinny}"},
        "line 1: model.preset: there is no preset 'tinny'; did you mean 'tiny'?",
    ),
    (
        {"model": "{preset: tiny, overrides: {n_layer: 3}}"},
        "model.overrides.n_layer: a preset has no field 'n_layer'; did you mean 'n_layers'?",
    ),
    ({"model": "{preset: tiny, revision: main}"}, "model.revision belongs to model.path"),
    (
        {"model": "{preset: tiny, backend: transformers}"},
        "model.backend=transformers can't build a model.preset",
    ),
    (
        {"model": "{path: x, backend: ratchet, trust_remote_code: true}"},
        "model.trust_remote_code is read only by transformers",
    ),
    (
        {"model": "{preset: tiny, train_encoders: true}"},
        "model.train_encoders=true needs a multimodal model",
    ),
    (
        {"model": "{path: x, backend: ratchet, train_encoders: true}"},
        "model.train_encoders=true needs a multimodal model",
    ),
    (
        {"model": "{preset: tiny, freeze: [model.norm]}", "lora": "{rank: 2}"},
        "model.freeze clashes with lora, which freezes all weights",
    ),
    (
        {"model": "{preset: tiny, freeze: [model.norm]}", "learner": "{kind: megatron}"},
        "learner.kind=megatron can't freeze weights of the model: set learner.kind=dtensor or local",
    ),
    (
        {"weight_sync": "{kind: delta, host: 10.0.0.1}"},
        "host has no effect with through=files: set through=collective, or remove host",
    ),
    (
        {"learner": "{kind: dtensor, pipeline_parallel: 2, stage_layers: [1]}"},
        "stage_layers=[1] has 1 stages, but pipeline_parallel x pipeline_chunks is 2: give 2 numbers",
    ),
    (
        {"learner": "{kind: dtensor, context_parallel: 2, attention: varlen}"},
        "attention=varlen has no effect with context_parallel",
    ),
    (
        {"model": "{path: x, train_encoders: true}", "lora": "{rank: 2}"},
        "model.train_encoders=true clashes with lora, which adapts the language model",
    ),
    (
        {"tokenizer": None},
        "tokenizer.kind=auto reads the model's tokenizer, and a model.preset has none",
    ),
    (
        {
            "model": "{preset: tiny, overrides: {max_positions: 64}}",
            "sampling": "{max_new_tokens: 64}",
        },
        "line 5: sampling.max_new_tokens: sampling.max_new_tokens=64 leaves no room for a prompt "
        "in the "
        "model's context of 64 tokens",
    ),
    (
        {"evaluation": "{tasks: 0, every: 5}"},
        "evaluation.every=5 with evaluation.tasks=0 evaluates nothing",
    ),
    (
        {"evaluation": "{tasks: 0, environment: {kind: sorting}}"},
        "evaluation.environment=sorting with evaluation.tasks=0 evaluates nothing",
    ),
    (
        {"evaluation": "{patience: 2}"},
        "patience=2 counts evaluations during the stage: set every above 0",
    ),
    ({"evaluation": "{metric: eval/sampled}"}, "metric is not read without patience or stop_at"),
    ({"evaluation": "{stop_at: 0.5}"}, "stop_at=0.5 is compared in evaluations between steps"),
    ({"evaluation": "{every: 1, stop_at: 1, min_gain: 1}"}, "min_gain is not read with patience=0"),
    ({"evaluation": "{greedy: false}"}, "greedy=false and samples=0 leave no attempt: set samples"),
    ({"checkpoint": "{end_with: best}"}, "end_with is not read with keep_best=0"),
    (
        {"checkpoint": "{end_with: best, keep_best: 1, every: 20}", "evaluation": "{every: 30}"},
        "checkpoint.end_with=best needs a checkpoint after each evaluation, and "
        "checkpoint.every=20 with evaluation.every=30",
    ),
    (
        {"evaluation": "{tasks: 0, samples: 5}"},
        "evaluation.samples=5 with evaluation.tasks=0 evaluates nothing",
    ),
    (
        {"algorithm": "{kind: sft}", "sampling": "{temperature: 0}", "evaluation": "{samples: 2}"},
        "evaluation.samples=2 at sampling.temperature=0 are all equal: set evaluation.temperature",
    ),
    (
        {"agent": "{kind: command, command: [play], host: 0.0.0.0}"},
        "agent.host=0.0.0.0 is not an address that an agent can call: set agent.public_host",
    ),
    (
        {"agent": "{kind: command, command: [play]}", "rollouts": "{history_window: 2}"},
        "agent command writes the prompts itself, so rollouts.history_window has no effect",
    ),
    (
        {"algorithm": "{kind: sft}", "rewards": "[{kind: countdown}]"},
        "rewards judge attempts, and algorithm sft generates none: remove rewards",
    ),
    (
        {"eval_rewards": "[{kind: countdown}]", "evaluation": "{environment: {kind: countdown}}"},
        "eval_rewards judge in evaluation, and evaluation.environment=countdown is judged by its own reward: remove eval_rewards",
    ),
    (
        {"eval_rewards": "[{kind: countdown}]", "evaluation": "{tasks: 0}"},
        "eval_rewards judge in evaluation, and evaluation.tasks=0 evaluates nothing: remove eval_rewards, or set evaluation.tasks above 0",
    ),
    (
        {"rewards": "[{kind: countdown}, {kind: countdown}]"},
        "line 5: rewards: rewards has countdown twice",
    ),
    (
        {"stages": "[{name: a}, {name: b, generator: {kind: hf}}]"},
        "stages a and b differ in generator, and one generator serves the whole run: set generator at the top",
    ),
]


@pytest.mark.parametrize(("changes", "message"), [*UNKNOWN_KEYS, *WRONG_VALUES, *CLASHES])
@pytest.mark.fault("C1", "C2", "C3", "C4", "C7", "D7")
def test_a_wrong_recipe_is_told_where_and_how_to_mend_it(refusal, changes, message):
    changes = {key: value for key, value in changes.items() if value is not None or key in BASE}
    told = refusal(changes)
    assert message in told
    assert "problems:" not in told  # one mistake, one problem


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "override 'steps' is not of the form a.b.c=value"),
        ("a..b=1", "override 'a..b=1' is not of the form a.b.c=value"),
        ("optimizer.lrr=1", "command line: optimizer.lrr: unknown key; did you mean 'lr'?"),
        ("lr=1", "command line: lr: unknown key; it belongs in 'optimizer.lr'"),
        ("seed=x", "command line: seed: 'x' must be a whole number"),
        ("seed=[1", "is not YAML"),
        ("extends=x.yaml", "extends can't be overridden"),
        (
            "stages.gpro.steps=1",
            "command line: stages.gpro: there is no 'gpro' here; did you mean 'grpo'?",
        ),
        ("stages.grpo=null", "command line: stages.grpo: must be a section"),
        ("model.preset.x=1", "command line: model.preset: must be text"),
        ("optimizer={lr: 1, lr: 2}", "optimizer.lr: is set twice"),
    ],
)
@pytest.mark.fault("C10")
def test_a_wrong_override(refusal, override, message):
    assert message in refusal({}, [override])


STAGES = {
    "algorithm": None,
    "stages": "[{algorithm: {kind: sft}, steps: 4}, {algorithm: {kind: grpo, group_size: 4}}]",
}


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("steps=5", "stages.sft.steps"),
        ("algorithm.group_size=5", "stages.grpo.algorithm.group_size"),
        # the stages choose the kind that has the key
        ("algorithm.group_size=0", "stages.grpo.algorithm.group_size"),
        ("algorithm.epochs=2", "stages.sft.algorithm.epochs or stages.grpo.algorithm.epochs"),
        ("algorithm={kind: grpo}", "stages.sft.algorithm.kind or stages.grpo.algorithm.kind"),
    ],
)
def test_an_override_that_the_stages_would_hide_names_the_right_path(refusal, override, instead):
    path = override.partition("=")[0] + (".kind" if "{" in override else "")
    told = refusal(STAGES, [override])
    assert (
        told
        == f"command line: {path}: has no effect, because the stages set it themselves: set {instead} instead"
    )


@pytest.mark.fault("C9")
def test_a_key_set_twice_is_told_with_both_lines(refusal):
    told = refusal({"seed": "1\nsteps: 3\nseed: 2"})
    assert told == "line 7: seed: is set twice, here and in line 5: remove one"


def test_all_problems_come_at_once_in_order_of_lines(refusal):
    told = refusal({"optimizer": "{lr: -1, lrr: 2}", "seed": "x", "steps": "0\nsteps: 0"})
    assert told.splitlines()[0] == "4 problems:"
    assert [line.split(":")[0].strip() for line in told.splitlines()[1:]] == [
        "line 5",
        "line 5",
        "line 6",
        "line 8",
    ]


def test_a_wrong_default_of_many_stages_is_one_problem_where_it_was_written(refusal):
    told = refusal({"optimizer": "{lr: -1}", "stages": "[{name: a}, {name: b}, {name: c}]"})
    assert told == "line 5: optimizer.lr: -1 must be more than 0"


def test_a_clash_points_at_the_key_that_was_written(refusal):
    assert refusal({"batch_size": "2"}, ["algorithm.minibatches=4"]).startswith(
        "command line: algorithm.minibatches"
    )
    told = refusal({"tokenizer": "{kind: auto}"})
    assert told.startswith("line 2: tokenizer.kind")


def test_rewards_that_another_stage_reads_are_in_order(tmp_path):
    path = tmp_path / "r.yaml"
    lines = [f"{key}: {value}" for key, value in {**BASE, "algorithm": "{kind: grpo}"}.items()]
    path.write_text(
        "\n".join(
            [
                *lines,
                "rewards: [{kind: countdown}]",
                "stages: [{algorithm: {kind: sft}}, {name: rl}]",
            ]
        )
    )
    assert [stage.rewards[0].kind for stage in load_config(path).stages] == [
        "countdown",
        "countdown",
    ]


WORDS = [
    "kind",
    "name",
    "stages",
    "extends",
    "model",
    "preset",
    "algorithm",
    "environment",
    "rewards",
    "optimizer",
    "betas",
    "0",
    "x",
]
VALUES = st.recursive(
    st.sampled_from(
        [
            None,
            True,
            0,
            -1,
            1.5,
            "tiny",
            "grpo",
            "sorting",
            "json:loads",
            "a:",
            ":",
            "",
            "exact_match",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)
GOOD = {
    "model": {"preset": "tiny"},
    "tokenizer": {"kind": "bytes"},
    "environment": {"kind": "sorting"},
    "algorithm": {"kind": "grpo"},
}


@pytest.mark.medium
@given(
    st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=4),
    st.lists(
        st.tuples(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3), VALUES), max_size=2
    ),
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_recipe_and_no_override_ends_in_a_traceback(tmp_path, changes, overrides):
    path = tmp_path / "fuzz.yaml"
    path.write_text(json.dumps({**GOOD, **changes}))
    with contextlib.suppress(ConfigError):
        load_config(path, [f"{'.'.join(keys)}={json.dumps(value)}" for keys, value in overrides])
