from ratchet.commands.describe_recipe import describe
from ratchet.config.schema import RunConfig


def stage(**keys):
    return {"algorithm": {"kind": "grpo"}, "environment": {"kind": "sorting"}, **keys}


def run(*stages):
    return RunConfig(
        name="r", seed=3, model={"preset": "tiny"}, tokenizer={"kind": "bytes"}, stages=list(stages)
    )


def test_the_arithmetic_of_a_run_by_hand():
    text = describe(
        run(
            stage(
                name="sft",
                algorithm={"kind": "sft"},
                steps=30,
                batch_size=8,
                examples=48,
                evaluation={"tasks": 0},
            ),
            stage(
                name="rl",
                algorithm={"kind": "grpo", "group_size": 4, "minibatches": 3, "epochs": 2},
                steps=100,
                batch_size=10,
                sampling={"max_new_tokens": 50},
                optimizer={"warmup_steps": 6},
                evaluation={"tasks": 20, "samples": 2, "every": 20},
                checkpoint={"every": 50, "keep": 3},
            ),
        )
    )
    assert text.splitlines() == [
        "run           r, seed 3, device auto",
        "model         preset tiny, random weights, context 4,096 tokens",
        "tokenizer     bytes",
        "",
        "stage 1 of 2: sft (steps 1 to 30 of 130)",
        "  algorithm     sft on sorting",
        "  batch         8 rows a step",
        "  updates       1 optimizer step a batch (1 x 8 groups, 1 epoch), 30 optimizer steps in "
        "all, 0 of them warm-up",
        "  data          240 tasks drawn from 48: 5 times each",
        "  evaluation    none",
        "  checkpoints   1 written, the newest 2 kept",
        "",
        "stage 2 of 2: rl (steps 31 to 130 of 130)",
        "  algorithm     grpo on sorting",
        "  rewards       exact_match",
        "  batch         10 prompts x 4 attempts = 40 trajectories a step, at most 2,000 new "
        "tokens (50 each)",
        "  updates       6 optimizer steps a batch (3 x 3 to 4 groups, 2 epochs), "
        "600 optimizer steps in all, 6 of them warm-up",
        "  data          1,000 tasks drawn",
        # at 40, 60, 80, 100, 120
        "  evaluation    before, after and at 5 steps between, 60 attempts each (20 tasks, 1 greedy "
        "and 2 sampled)",
        # at 50, 100 and 130
        "  checkpoints   3 written, the newest 3 kept",
    ]


def test_what_ranks_share_out():
    learner = {"kind": "dtensor", "dp_shard": 4, "tensor_parallel": 2}
    text = describe(
        run(
            stage(
                name="rl",
                algorithm={"kind": "grpo", "group_size": 4},
                batch_size=3,
                learner=learner,
            )
        )
    )
    assert "learner       8 ranks (dp_shard 4 x tensor_parallel 2), cluster local" in text
    assert "  ranks         12 rows for 4 data ranks, about 3 each" in text
    text = describe(
        run(stage(name="sft", algorithm={"kind": "sft"}, batch_size=3, learner=learner))
    )
    assert (
        "  ranks         3 rows for 4 data ranks, about 1 each; 1 data rank gets none and computes "
        "filler rows" in text
    )


def test_a_mark_on_the_last_step_is_not_counted_twice():
    text = describe(
        run(stage(name="rl", steps=100, evaluation={"every": 50}, checkpoint={"every": 50}))
    )
    assert "evaluation    before, after and at 1 step between" in text
    assert "checkpoints   2 written" in text


def test_what_is_trained_on_again():
    text = describe(run(stage(name="rl", rollouts={"replay": {"groups": 3}})))
    assert "  replay        plus up to 3 earlier groups in each step\n" in text


def test_a_teacher_that_is_not_there_yet_is_said(tmp_path):
    teacher = {"a": str(tmp_path), "b": "runs/none/model", "c": str(tmp_path)}
    text = describe(
        run(stage(name="d", algorithm={"kind": "distill_on_policy", "teacher": teacher}))
    )
    assert f"  teacher       {tmp_path}, runs/none/model (no directory here)\n" in text
    assert "teacher" not in describe(run(stage(name="rl")))


def test_generators_in_processes_of_their_own():
    vllm = {"kind": "vllm", "tensor_parallel": 2}
    workers = {"kind": "workers", "workers": 3, "worker": vllm, "recovery": "restart"}
    text = describe(run(stage(name="rl", generator=workers)))
    assert (
        "generator     3 workers of vllm (tensor_parallel 2), at most 3 restarts, cluster local"
        in text
    )
    assert "generator" not in describe(run(stage(name="rl")))
