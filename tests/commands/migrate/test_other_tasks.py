"""Files whose task has no conversion are refused, and never become another task."""

from pathlib import Path

import pytest

from ratchet.commands.migrate.importer import UnconvertedTask, read_config

NEMO_RL = "policy: {model_name: m}\ngrpo: {num_prompts_per_step: 8}\ncluster: {gpus_per_node: 1}\n"
ROLL = "pretrain: m\nrollout_batch_size: 8\nactor_train: {model_args: {dtype: bf16}}\n"
VERL = "data: {train_files: a.parquet}\nalgorithm: {adv_estimator: grpo}\n"
ROLLOUT = VERL + "actor_rollout_ref: {rollout: "
TRL = "model_name_or_path: m\ndataset_name: d\n"
TRL_GRPO = TRL + "num_generations: 4\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (VERL + "distillation: {enabled: true}", "distills on-policy"),
        (ROLLOUT + "{multi_turn: {enable: true}}}", "several turns.*kind=tool_use"),
        (ROLLOUT + "{agent: {default_agent_loop: tool_agent}}}", "agent loop is tool_agent"),
        (
            ROLLOUT + "{multi_turn: {tool_config_path: tools.yaml}}}",
            r"several turns \(multi_turn.tool_config_path\)",
        ),
        ("algorithm: {adv_estimator: gpg}", "adv_estimator=gpg is not converted"),
        (VERL.replace("grpo", "[grpo]"), r"adv_estimator=\['grpo'\] is not converted"),
        (
            "{data: {train_files: a.parquet}, model: {partial_pretrain: m}, trainer: {nnodes: 1}}",
            "new recipe --like sft --data a.parquet --model m",
        ),
        (TRL + "beta: 0.1\nloss_type: sigmoid\nreward_model_path: r", "samples answers"),
        (TRL + "beta: 0.1\nloss_type: sigmoid\nmissing_eos_penalty: 1.0", "missing_eos_penalty"),
        (TRL_GRPO + "reward_model_name_or_path: r", "kind: reward_model, path: r"),
        (TRL_GRPO + "environment_factory: my.E", "several turns .environment_factory"),
        (ROLL.replace("bf16", "bf16, model_type: diffusion_module"), "diffusion model"),
        (ROLL + "student_train: {model_args: {dtype: bf16}}", "distills on-policy"),
        (ROLL + "is_pure_opd: true", "distills on-policy"),
        ("student_pretrain: m\nstudent: {model_args: {dtype: bf16}}", "distills off-policy"),
        (ROLL + "validation: {data_args: {image_max_pixels: 64}}", "images.*kind=vlm"),
        (
            ROLL + "rewards: {a: {worker_cls: x.LLMJudgeRewardWorker}}",
            "none of .* LLMJudge.*judge_prompt",
        ),
        (ROLL + "use_topr_neg_loss_coef: 1.0", "policy loss is topr.*loss.kind=topr"),
        (ROLL + "adv_estimator: step_reinforce", "step_reinforce is not converted"),
        (
            NEMO_RL + "env: {should_use_nemo_gym: true, math: {num_workers: 8}}",
            "environment.kind=nemo_gym",
        ),
        (
            NEMO_RL + "env: {math: {num_workers: 8}, sliding_puzzle_game: {size: 3}}",
            "is sliding_puzzle_game.*environment.kind=sliding_puzzle",
        ),
        (
            NEMO_RL + "data: {train: [{dataset_name: AIME2026}, {data_path: d/b.jsonl}]}",
            r"mixes 2 datasets.*parts: \[{kind: dataset, preset: aime_2026, tag: AIME2026}, "
            r"{kind: dataset, train: d/b.jsonl, tag: b}\]}",
        ),
        (NEMO_RL + "data: {train: {dataset_name: clevr-cogent}}", "has images.*kind=vlm"),
        (
            NEMO_RL.replace("8}", "8, adv_estimator: {name: opd}}"),
            "opd is not converted.*on_policy_distillation",
        ),
        (NEMO_RL + "data: {default: {env_name: reward_model}}", "kind: reward_model"),
        (NEMO_RL + "data: {default: {env_name: clevr-cogent}}", "is clevr-cogent.*kind=vlm"),
    ],
)
def test_another_task_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(UnconvertedTask, match=words):
        read_config(path)


@pytest.mark.parametrize(
    "text",
    [
        ROLL + "is_pure_opd: false",
        ROLLOUT + "{multi_turn: {enable: false}, agent: {default_agent_loop: single_turn_agent}}}",
        TRL_GRPO + "reward_model_name_or_path: r\nreward_funcs: [accuracy_reward]",
        NEMO_RL + "env: {math: {num_workers: 8}}",
        NEMO_RL + "data: {default: {env_name: dapo}}\nenv: {dapo: {num_workers: 8}}",
        "policy: {model_name: m}\nsft: {max_num_steps: 8}\nenv: {nemo_gym: {a: 1}}\n",
    ],
)
def test_questions_are_converted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    assert read_config(path).recipe["environment"]["kind"] == "dataset"
