"""`ratchet import`: configurations as the four peers write them become recipes that `ratchet check`
accepts, and every key is accounted for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.commands.migrate.command import format_conversion_report, format_recipe
from ratchet.commands.migrate.importer import PEERS, ImportResult, read_config
from ratchet.commands.migrate.read_config import read_source
from ratchet.commands.migrate.shell import Variables
from ratchet.commands.migrate.table import Method
from ratchet.config.key_paths import leaf_keys
from ratchet.config.loader import load_config
from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError
from ratchet.utils import failpoints

FILES = Path(__file__).parent / "peers"
EXAMPLES = {
    "trl_grpo.yaml": ("trl", "GRPOConfig"),
    "trl_dpo.json": ("trl", "DPOConfig"),
    "trl_sft.yaml": ("trl", "SFTConfig"),
    "verl_grpo.sh": ("verl", "PPO trainer"),
    "verl_ppo.yaml": ("verl", "PPO trainer"),
    "nemo_grpo.yaml": ("nemo-rl", "grpo"),
    "nemo_ppo.yaml": ("nemo-rl", "ppo"),
    "nemo_distillation.yaml": ("nemo-rl", "distillation"),
    "nemo_dpo.yaml": ("nemo-rl", "dpo"),
    "roll_rlvr.yaml": ("roll", "RLVR"),
    "roll_dpo.yaml": ("roll", "DPO"),
}
READ = {name: read_config(FILES / name) for name in EXAMPLES}


def written(tmp_path: Path, text: str, name: str = "theirs.yaml") -> ImportResult:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_config(path)


def note_on(result: ImportResult, key: str) -> str:
    return next(item.note for item in result.items if item.peer_key == key)


@pytest.mark.parametrize("name", EXAMPLES)
def test_whose_it_is_is_told_from_its_keys(name: str) -> None:
    assert (READ[name].peer.name, READ[name].method) == EXAMPLES[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_comes_of_it_is_accepted(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(format_recipe(READ[name], name), encoding="utf-8")
    config = load_config(recipe)
    assert READ[name].problems == []
    assert config.model.path == READ[name].recipe["model"]["path"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_key_is_accounted_for(name: str) -> None:
    """Taken over, of another meaning, without counterpart, null, or unresolved: the file's keys and
    no others."""
    result = READ[name]
    source = read_source(FILES / name)
    told = [item.peer_key for item in result.items if not item.is_default] + result.null_keys
    assert sorted(told) == sorted(source.values)
    assert all(item.recipe_keys or item.note or item.covered_by for item in result.items)
    text = "\n".join(format_conversion_report(result))
    for item in result.different + result.dropped:
        assert item.peer_key in text
    for key in [*source.unresolved, *result.null_keys]:
        assert key in text


@pytest.mark.parametrize("name", EXAMPLES)
def test_keys_of_the_examples_are_in_the_tables(name: str) -> None:
    unknown = [item.peer_key for item in READ[name].dropped if "is not in the table" in item.note]
    assert unknown == (["brand_new_key"] if name == "trl_grpo.yaml" else [])


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, id=f"{peer.name}-{name}")
        for peer in PEERS.values()
        for name, method in peer.methods.items()
    ],
)
def test_tables_name_keys_that_there_are(method: Method) -> None:
    known = {re.sub(r"\[.*?\]", "", key).removeprefix("stages.") for key in leaf_keys(RunConfig)}
    known |= {key.rpartition(".")[0] for key in known} | {
        "algorithm",
        "generator",
        "cluster",
        "learner",
        "environment",
    }
    known |= {f"{section}.kind" for section in known} | {"environment.columns"}
    for row in method.rows:
        for key in filter(None, row.recipe_key.split(", ")):
            assert key in known, row
        assert row.recipe_key or row.note or row.covered_by or row.convert, row
    names = [row.peer_key for row in method.rows]
    assert sorted(set(names)) == sorted(names), "a key has two rows"
    assert {row.covered_by for row in method.rows if row.covered_by} <= set(names)


# --- what becomes of values


def test_trl_counts_answers_of_one_process_and_optimizer_steps() -> None:
    flat = READ["trl_grpo.yaml"].flat
    # 16 answers x 8 steps a generation, by 8 answers a prompt; 8 steps in 2 optimizer steps of 4;
    # and each twice
    assert (flat["batch_size"], flat["algorithm.minibatches"], flat["algorithm.epochs"]) == (
        16,
        2,
        2,
    )
    # it shuffles answers before it divides them
    assert flat["algorithm.minibatches_of"] == "attempts"
    assert flat["steps"] == 400 // (2 * 2)
    assert flat["optimizer.warmup_steps"] == 40


def test_a_script_of_trl_is_sent_to_the_page_whose_file_is_imported(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards.py").write_text("def right(completions, answer, **kwargs): return [0]")
    (tmp_path / "train.py").write_text("GRPOConfig(learning_rate=1e-6)")
    with pytest.raises(ConfigError, match=r"train.py is a Python script.*docs/start/from-trl.md"):
        read_config(tmp_path / "train.py")
    page = (repository / "docs" / "start" / "from-trl.md").read_text()
    file = tmp_path / "grpo.yaml"
    file.write_text(page.partition("```yaml\n# grpo.yaml\n")[2].partition("```")[0])
    recipe = read_config(file).recipe
    assert recipe["rewards"] == [{"kind": "trl", "function": "my_rewards:right", "weight": 1.0}]
    assert (recipe["steps"], recipe["batch_size"]) == (20, 4)


def test_trl_loss_types_are_weightings(tmp_path: Path) -> None:
    def flat(loss: str) -> dict[str, Any]:
        return written(
            tmp_path,
            f"num_generations: 8\nmodel_name_or_path: m\nmax_completion_length: 64\n{loss}",
        ).flat

    assert flat("")["algorithm.weighting"] == "token_mean"
    assert flat("loss_type: grpo")["algorithm.weighting"] == "sequence_mean"
    assert flat("loss_type: dr_grpo")["algorithm.fixed_length"] == 64
    assert flat("loss_type: cispo\nepsilon_high: 5.0")["algorithm.loss.clip_high"] == 4.0
    assert (
        flat("importance_sampling_level: sequence\nepsilon: 3e-4\nepsilon_high: 4e-4")[
            "algorithm.kind"
        ]
        == "gspo"
    )
    assert flat("loss_type: luspo")["algorithm.kind"] == "grpo"


def test_the_direction_of_a_kl_is_that_of_its_gradient() -> None:
    """k3 differentiated as it stands has the gradient of KL(reference || policy)."""
    assert READ["trl_grpo.yaml"].flat["algorithm.kl.objective"] == "forward"
    assert READ["verl_grpo.sh"].flat["algorithm.kl.objective"] == "forward"
    assert READ["verl_ppo.yaml"].flat["algorithm.kl.place"] == "reward"


def test_verl_is_on_all_accelerators_by_turns() -> None:
    recipe = READ["verl_grpo.sh"].recipe
    assert recipe["generator"] == {
        "kind": "workers",
        "workers": 8,
        "worker": {"kind": "vllm", "tensor_parallel": 2},
    }
    assert recipe["learner"]["dp_shard"] == 16
    assert recipe["cluster"] == {"colocated": True, "kind": "ray", "nodes": 2, "gpus_per_node": 8}
    assert recipe["algorithm"]["minibatches"] == 1024 // 256
    assert recipe["algorithm"]["group_size"] == 5  # a variable of the script


def test_nemo_counts_answers_in_its_global_batch() -> None:
    flat = READ["nemo_grpo.yaml"].flat
    assert flat["algorithm.minibatches"] == 32 * 8 // 64
    assert flat["algorithm.loss.clip_high"] == 0.28
    assert flat["learner.micro_batch_tokens"] == 512 * 4  # ${mul:...}, from the file below
    assert flat["optimizer.warmup_steps"] == 50 * 4  # their scheduler counts batches


def test_reward_functions_are_kept_by_their_path(tmp_path: Path) -> None:
    rewards = READ["trl_grpo.yaml"].recipe["rewards"]
    assert rewards[-1] == {
        "kind": "trl",
        "function": "commands.migrate.peers.my_rewards:brevity",
        "weight": 0.1,
    }
    assert READ["trl_grpo.yaml"].recipe["tokenizer"] == {
        "chat_template_kwargs": {"enable_thinking": False}
    }
    file = FILES / "my_rewards.py"
    text = (
        f"custom_reward_function: {{path: {file}, reward_kwargs: {{scale: 2}}}}\n"
        "data: {train_files: a.parquet, apply_chat_template_kwargs: {enable_thinking: false}}\n"
        "actor_rollout_ref: {model: {path: org/model}}\n"
    )
    result = written(tmp_path, text)
    assert result.recipe["rewards"] == [
        {
            "kind": "verl",
            "function": f"{file}:compute_score",
            "reward_kwargs": {"scale": 2},
        }
    ]
    assert result.recipe["tokenizer"] == {"chat_template_kwargs": {"enable_thinking": False}}


def test_roll_rewards_are_of_the_domains() -> None:
    result = READ["roll_rlvr.yaml"]
    domains = result.recipe["rewards"][0]["domains"]
    assert domains == {
        "deepmath_103k": [{"kind": "math"}],
        "aime": [{"kind": "math"}],
        "KodCode": [{"kind": "code", "timeout_s": 20, "language": "block"}],
    }
    assert result.flat["environment.keep"] == [{"column": "tag", "one_of": list(domains)}]
    note = note_on(result, "rewards.llm_judge.worker_cls")
    assert "its rows are left out" in note
    assert "reads YES or NO" in note  # the file names no question
    # 8 accelerators, 2 of them on each data rank
    assert result.flat["algorithm.minibatches"] == 64 * 8 // (1 * 32 * 4)


def test_roll_domains_of_instructions_and_letters_are_converted(tmp_path) -> None:
    text = (FILES / "roll_rlvr.yaml").read_text(encoding="utf-8")
    place = "roll.pipeline.rlvr.rewards"
    text = text[: text.index("  code_sandbox:")] + (
        f"  ifeval: {{worker_cls: {place}.ifeval_rule_reward_worker.GeneralRuleRewardWorker, reward_type: soft}}\n"
        f"  crossthinkqa: {{worker_cls: {place}.crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker, reward_type: soft}}\n"
    )
    result = written(tmp_path, text)
    repetition = {"kind": "repetition", "unit": "words", "ngram": 3, "weight": 0.5}
    domains = result.recipe["rewards"][0]["domains"]
    assert domains["ifeval"] == [{"kind": "ifeval"}, repetition]
    assert domains["crossthinkqa"] == [{"kind": "crossthinkqa", "credit": "soft"}, repetition]
    assert "environment.keep" not in result.flat
    assert result.flat["environment.columns.tag"] == "tag"


@pytest.mark.parametrize(
    ("keys", "judge", "generator"),
    [
        (
            "judge_model_type: inference, model_args: {model_name_or_path: m}, device_mapping: [6, 7], "
            "strategy_args: {strategy_name: hf_infer}",
            "llm_judge",
            {"kind": "workers", "workers": 2, "worker": {"kind": "hf"}},
        ),
        (
            "judge_model_type: cluster}\nreward_model: {model_args: {model_name_or_path: m}, "
            "device_mapping: '[6, 7]', strategy_args: {strategy_name: vllm, strategy_config: "
            "{tensor_parallel_size: 2, max_model_len: 99}}",
            "llm_judge",
            {
                "kind": "workers",
                "workers": 1,
                "worker": {"kind": "vllm", "tensor_parallel": 2, "max_context": 99},
            },
        ),
        (
            "judge_model_type: api, judge_api_url: 'http://h/v1', judge_model_name: m, judge_api_key: sk-secret",
            None,
            None,
        ),
        ("judge_model_type: inference", "has no model", None),
        ("judge_model_type: api", "needs judge_api_url", None),
    ],
)
def test_judges_of_roll_become_models_of_the_run(tmp_path, keys, judge, generator) -> None:
    text = (FILES / "roll_rlvr.yaml").read_text(encoding="utf-8")
    worker = "worker_cls: x.LLMJudgeRewardWorker, judge_prompt: Qwen2.5-7B-Instruct-RLVR-prompt"
    text = text[: text.index("  llm_judge:")] + f"  llm_judge: {{{worker}, {keys}}}\n"
    result = written(tmp_path, text)
    domain = result.recipe["rewards"][0]["domains"].get("llm_judge")
    if domain is None:
        assert judge in note_on(result, "rewards.llm_judge.worker_cls")
        return
    assert domain[0]["verdict"] == "yes_no"
    assert domain[0].get("judge") == judge
    if generator is None:
        assert (domain[0]["url"], domain[0]["model"]) == ("http://h/v1", "m")
        assert domain[0]["api_key_env"] == "JUDGE_API_KEY"
        assert "sk-secret" not in format_recipe(result, "rlvr.yaml")
    else:
        (section,) = result.recipe["judges"]
        assert section == {"name": "llm_judge", "path": "m", "generator": generator}


def test_a_judge_without_a_model_beside_one_with_a_model_is_left_out_alone(tmp_path) -> None:
    text = (FILES / "roll_rlvr.yaml").read_text(encoding="utf-8")
    judge = (
        "{worker_cls: x.LLMJudgeRewardWorker, judge_prompt: Qwen2.5-7B-Instruct-RLVR-prompt, "
        "judge_model_type: inference"
    )
    text = text[: text.index("  math_rule:")] + f"  a: {judge}}}\n"
    result = written(tmp_path, text + f"  b: {judge}, model_args: {{model_name_or_path: m}}}}\n")
    assert list(result.recipe["rewards"][0]["domains"]) == ["b"]
    assert "in one domain this reward" in note_on(result, "rewards.a.worker_cls")


def test_defaults_that_differ_are_taken_too() -> None:
    result = READ["trl_dpo.json"]
    betas = next(item for item in result.items if item.peer_key == "adam_beta2")
    assert betas.is_default
    assert betas.recipe_keys == {"optimizer.betas": [0.9, 0.999]}


# --- what is refused, not known, or not there


def test_what_check_refuses_is_left_out_with_its_words() -> None:
    result = READ["verl_ppo.yaml"]
    assert "top_p" not in result.recipe["sampling"]
    assert "needs a rollout correction" in note_on(result, "actor_rollout_ref.rollout.top_p")


def test_what_cannot_be_resolved_is_named() -> None:
    assert "ppo_trainer" in " ".join(READ["verl_ppo.yaml"].unresolved)
    assert (
        "oc.env"
        in READ["verl_ppo.yaml"].unresolved[
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
        ]
    )
    assert "../not-here.yaml" in " ".join(READ["nemo_dpo.yaml"].unresolved)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${nowhere}", "no key nowhere"),
        ("${grpo}", "whole section"),
        ("???", "command line"),
        ("${b}", "itself"),
        ("${f:1}", "f:"),
    ],
)
def test_an_interpolation_that_leads_nowhere(tmp_path: Path, value: str, reason: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"grpo: {{x: 1}}\nb: '{value}'\n")
    assert reason in read_source(path).unresolved["b"]


def test_interpolations_that_the_file_resolves(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "a: {b: 3, c: '${.b}', d: '${mul:${a.b}, 2}', e: 'x-${a.b}', f: '${oc.select:no,7}', g: "
        "['${a.b}']}\n"
    )
    assert read_source(path).values == {
        "a.b": 3,
        "a.c": 3,
        "a.d": 6,
        "a.e": "x-3",
        "a.f": 7,
        "a.g": [3],
    }


def test_anchors_are_followed(tmp_path: Path) -> None:
    result = written(
        tmp_path, "model_name_or_path: m\nnum_generations: &n 4\nper_device_train_batch_size: *n\n"
    )
    assert result.flat["algorithm.group_size"] == 4
    assert result.flat["batch_size"] == 1


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("a: 1\n", "x.yaml", "--from with one of trl, verl, nemo-rl, roll"),
        (
            "policy: {model_name: m}\ncluster: {gpus_per_node: 1}\n",
            "x.yaml",
            "the kind of training",
        ),
        ("[1]", "x.json", "keys and values"),
        ("{", "x.json", "JSON"),
        ("echo hello\n", "x.sh", "no override"),
        ("a: [\n", "x.yaml", "YAML"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, name: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_config(path)


def test_a_value_of_another_form_is_no_traceback(tmp_path: Path) -> None:
    result = written(
        tmp_path,
        "model_name_or_path: m\nnum_generations: many\nper_device_train_batch_size: "
        "8\nlearning_rate: fast\nadam_beta1: [1]\n",
    )
    assert "'fast', and not a number" in note_on(result, "learning_rate")
    assert "num_generations is 'many'" in note_on(result, "per_device_train_batch_size")


def test_variables_of_a_script_that_are_not_plain(tmp_path: Path) -> None:
    text = (
        'python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.seed=${A:-"${B}"} '
        "trainer.nnodes=$((B+1))\n"
    )
    result = written(tmp_path, text, "run.sh")
    assert set(result.unresolved) == {"data.seed", "trainer.nnodes"}


def test_what_cannot_be_taken_out_is_written_and_told(tmp_path: Path) -> None:
    """A group of one has no baseline, and no value of theirs says what the recipe should do about
    it."""
    path, out = tmp_path / "verl.yaml", tmp_path / "out.yaml"
    path.write_text("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {model: {path: m}}\n")
    done = CliRunner().invoke(app, ["import", str(path), "--out", str(out)])
    assert isinstance(done.exception, ConfigError)
    assert "group_size=1" in str(done.exception)
    assert "# To be fixed before the recipe can run:" in out.read_text()


# --- the command


@pytest.mark.medium
def test_the_command_writes_once_and_lists(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    arguments = ["import", str(FILES / "nemo_grpo.yaml"), "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "Decide on these, which have no counterpart:" in done.output
    assert "policy.model_name=Qwen/Qwen2.5-1.5B -> model.path" in done.output
    assert f"next: ratchet check {out}" in done.output
    assert "# Decide on these, which have no counterpart:" in out.read_text()
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, ConfigError)
    assert "not overwritten" in str(again.exception)


@pytest.mark.parametrize("kind", ["no folder", "dangling link"])
def test_a_place_that_cannot_be_written_is_named(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "missing" / "mine.yaml"
    if kind == "dangling link":
        (tmp_path / "link.yaml").symlink_to(out)
        out = tmp_path / "link.yaml"
    done = CliRunner().invoke(app, ["import", str(FILES / "nemo_grpo.yaml"), "--out", str(out)])
    assert isinstance(done.exception, ConfigError)
    assert str(out) in str(done.exception)
    assert list(tmp_path.iterdir()) == ([out] if kind == "dangling link" else [])


def test_a_full_disk_leaves_no_part_of_a_recipe(tmp_path: Path) -> None:
    arguments = ["import", str(FILES / "nemo_grpo.yaml"), "--out", str(tmp_path / "mine.yaml")]
    try:
        failpoints.arm("file.drafted:1:enospc")
        done = CliRunner().invoke(app, arguments)
    finally:
        failpoints.arm("")
    assert isinstance(done.exception, ConfigError)
    assert "can't be written: No space left on device" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "nemo.yaml"
    text = (FILES / "nemo_grpo.yaml").read_text(encoding="utf-8")
    path.write_text(f'{text}\n"odd\\e[2Jkey": "\\e[31mred"\n', encoding="utf-8")
    done = CliRunner().invoke(app, ["import", str(path)])
    assert "odd" in done.output
    assert "\x1b" not in done.output


def test_without_out_the_recipe_is_printed() -> None:
    done = CliRunner().invoke(app, ["import", str(FILES / "roll_dpo.yaml"), "--from", "roll"])
    assert done.stdout.startswith("# From roll_dpo.yaml")
    assert "algorithm: {kind: dpo" in done.stdout
    assert "Taken over:" in done.stderr


SHELL = """\
DATA_HOME=${DATA_HOME:-"${HOME}/verl"}
LENGTH=$((1024 * 2))
BOTH=$(((LENGTH + 1) * 2))
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/train.parquet \\
    data.train_batch_size=$((LENGTH - 8 * 4 + 1)) \\
    data.max_response_length=${LENGTH} \\
    actor_rollout_ref.model.path=${DATA_HOME}/qwen \\
    actor_rollout_ref.model.lora_rank=64 \\
    data.val_files="['$PWD/a.parquet', '$(pwd)/b.parquet']" \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=4
"""


def test_a_scripts_arithmetic_and_defaults_are_read_and_vllm_is_started_for_the_adapter(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(SHELL)
    result = read_config(path, None)
    recipe = result.recipe
    assert (recipe["batch_size"], recipe["sampling"]["max_new_tokens"]) == (2017, 2048)
    assert recipe["lora"]["rank"] == 64
    generator = recipe["generator"]
    assert generator.get("worker", generator)["lora_rank"] == 64
    # The home directory is ~ in a recipe.
    assert recipe["model"]["path"] == "~/verl/qwen"
    assert recipe["environment"]["train"] == ["~/train.parquet"]
    assert recipe["environment"]["test"] == ["a.parquet", "b.parquet"]
    path.write_text(f"HOME=$OTHER\n{SHELL}")
    unresolved = str(read_config(path, None).unresolved)
    assert "/verl/qwen" in unresolved
    assert "/train.parquet" in unresolved


def test_arithmetic_that_is_not_plain_stays():
    known = Variables(values={"A": "3", "SUM": "1 + 1"})
    for text, expected in {
        "$((A * 2 + 1))": "7",
        "$((10 / 4))": "2",
        "$((2 - 5))": "-3",
        "$(((A + 2) * 2))": "10",
        "$((SUM * 4)) $(($SUM * 4))": "8 5",
        "$((2 * (A + (2 + 1))))": "$((2 * (A + (2 + 1))))",
        "$(((2 - A) * 2))": "$(((2 - A) * 2))",
        "$(((A + B) * 2))": "$(((A + B) * 2))",
        "$((2 - 5 + 4))": "$((2 - 5 + 4))",
        "$((2 ** 3))": "$((2 ** 3))",
        "$((010 + 1))": "$((010 + 1))",
        "$((B + 1))": "$((B + 1))",
        "$((1 / 0))": "$((1 / 0))",
    }.items():
        assert known.compute(text) == expected
