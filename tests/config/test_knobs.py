"""No dead knobs: every declared key is read by the code it is for, and changes what it says it
changes, or nothing.

A read is seen where it happens (an attribute of a section, from a frame of the product), so that a
key which is parsed, checked, written into config.yaml and then forgotten fails here by name.
"""

import asyncio
import copy
import inspect
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from config.knobs_used import graded, use_all
from sandbox.test_attacks import need

import ratchet.learners.compute.forward
import ratchet.models.decoder
from ratchet.config.base import Section
from ratchet.config.experience import SamplingConfig
from ratchet.config.key_paths import find_section, find_slot, leaf_keys
from ratchet.config.loader import load_config
from ratchet.config.resolve import section_class
from ratchet.config.schema import RunConfig
from ratchet.errors import TrainingError
from ratchet.executors.freeze import freeze
from ratchet.generators.engine.model_runner import ModelRunner
from ratchet.learners.compute.forward import Forward
from ratchet.models.decoder import Decoder
from ratchet.models.layers import varlen
from ratchet.models.layers.attention import PackedAttention
from ratchet.sandbox import Isolation
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_env_setup, build_run
from ratchet.training.start import start_run
from ratchet.types import Owner, Sampling
from ratchet.utils.thread_pool import ThreadPool

# --- every key is read

# key -> why nothing in this process reads it
EXEMPT: dict[str, str] = {
    "import_dirs": "read from the tree, before the kinds that it is for are imported",
}

TINY = {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1, "max_positions": 2048}}

# Two runs; the second starts from the model of the first, and is run by transformers.
FIRST = {
    "name": "first",
    "threads": 1,
    "model": TINY,
    "tokenizer": {"kind": "characters"},
    "optimizer": {"lr": 1e-3},
    "sampling": {"max_new_tokens": 4},
    "steps": 1, "batch_size": 2,
    "evaluation": {"tasks": 2, "samples": 1},
    "stages": [
        {
            "name": "a", "algorithm": {"kind": "sft"}, "environment": {"kind": "arithmetic"},
            "evaluation": {"every": 1, "patience": 1},
        },
        {
            "name": "b", "algorithm": {"kind": "grpo", "group_size": 2}, "environment": {"kind": "countdown"},
            "sentinels": {"canaries": {"kind": "sorting"}, "every": 1},
            "passes": 0.5, "examples": 4, "curriculum": {"difficulty": "target", "full_by_step": 1},
            "rollouts": {"max_staleness": 1, "adaptive": {"staleness": 0.5}},
        },
        {
            "name": "c", "algorithm": {"kind": "sft"}, "environment": {"kind": "sorting"}, "optimizer": {"kind": "muon"},
        },
        {
            "name": "d", "algorithm": {"kind": "sft"}, "environment": {"kind": "sorting"}, "lora": {"rank": 2},
            "optimizer": {"kind": "adamw8bit"},
        },
    ],
}  # fmt: skip
SECOND = {
    "threads": 1,
    "run_dir": "second",
    "model": {
        "path": "runs/first/model",
        "backend": "transformers",
        "freeze": ["*layernorm.weight"],
    },
    "generator": {"kind": "hf"},
    "algorithm": {"kind": "grpo", "group_size": 2, "correction": {}},
    "environment": {"kind": "gsm8k", "train": "questions.jsonl", "shots": 1},
    "rollouts": {
        "max_staleness": 1,
        "order": "ready",
        "dynamic_sampling": True,
        "max_replaced": 1,
        "group_filter": {"kind": "reward_std", "above": 0.1},
        "replay": {},
    },
    "sampling": {"max_new_tokens": 2},
    "steps": 1,
    "batch_size": 1,
    "evaluation": {"tasks": 1},
}


def is_check(frame) -> bool:
    """True if the frame is that of a private method of a section, such as a validator."""
    owner, _, method = frame.f_code.co_qualname.partition(".")
    cls = frame.f_globals.get(owner)
    return inspect.isclass(cls) and issubclass(cls, Section) and method.startswith("_")


def is_declaration(frame) -> bool:
    """True if the frame is of a module that declares keys: a key is not alive because its own
    checks read it."""
    module = frame.f_globals.get("__name__", "")
    reads = ("ratchet.config.model_shape.", "ratchet.environments.")
    declares = ".config" in module and not module.startswith(reads)
    return declares or module == Sampling.__module__ or is_check(frame)


class Reads:
    """(class, field) of everything that a frame of the product has read, while it is watching."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[type, str]] = set()
        # A stage's sampling is handed over whole, as a `Sampling`: what counts is what is read of
        # that.
        for watched in (Section, Sampling):
            patch.setattr(watched, "__getattribute__", self._watching(), raising=False)

    def _watching(self):
        seen = self.seen

        def read(section, name):
            frame = sys._getframe(1)
            # A property of a declaring module reads for its own reader.
            while frame.f_code is read.__code__ or (
                is_declaration(frame)
                and isinstance(getattr(type(section), frame.f_code.co_name, None), property)
            ):
                frame = frame.f_back
            is_product = frame.f_globals.get("__name__", "").startswith("ratchet.")
            if is_product and not is_declaration(frame):
                seen.add((SamplingConfig if type(section) is Sampling else type(section), name))
            return object.__getattribute__(section, name)

        return read


def place_of(key: str) -> tuple[type[Section], str]:
    """The class and field of a leaf key such as stages.algorithm[grpo].group_size."""
    model, name = RunConfig, ""
    for part in key.split("."):
        name, _, kind = part.rstrip("]").partition("[")
        owner, field = model, model.model_fields[name]
        model = (
            section_class(find_slot(field).name, kind)
            if kind
            else find_section(field.annotation) or model
        )
    return owner, name


def questions(path):
    rows = [
        {"question": f"What is {i} and {i}?", "answer": f"It is{' so' * i}.\n#### {2 * i}"}
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def reads(tmp_path_factory):
    need(Isolation.NAMESPACES)
    folder = tmp_path_factory.mktemp("knobs")
    questions(folder / "questions.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = Reads(patch)
        for name, recipe in {"first": FIRST, "second": SECOND}.items():
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
            assert start_run(folder / f"{name}.yaml", [], None, command="test") == 0
        for kind in ("{kind: bytes}", "{kind: byte_bpe, texts: [questions.jsonl]}"):
            build_policy(freeze(load_config(folder / "first.yaml", [f"tokenizer={kind}"])))
        build_env_setup(
            load_config(folder / "first.yaml", ["agent={kind: command, command: [play]}"]).stages[1]
        )
        steps_before_giving_up(1)
        use_all(folder / "runs" / "first" / "model", "questions.jsonl", patch)
    return found.seen


def elsewhere(key: str) -> bool:
    """An algorithm's keys have a test of their own; what others are made of are environments and
    rewards, and the parts of a mixture have three keys more. What runs on Ray or under torchrun is in
    tests/executors."""
    if key.startswith(("cluster[ray]", "cluster[torchrun]")):
        return True
    if any(part in key for part in (".problems[", ".worker[", ".canaries[", ".second_opinion[")):
        return True
    return "algorithm[" in key or (
        ".parts[" in key and not key.endswith((".parts[sorting].weight", ".parts[sorting].tag"))
    )


@pytest.mark.medium
@pytest.mark.needs(
    "bm25s",
    "gymnasium",
    "httpx2",
    "langdetect",
    "mcp",
    "nsenter",
    "peft",
    "soundfile",
    "unshare",
    "verifiers",
)
@pytest.mark.parametrize("key", [key for key in leaf_keys(RunConfig) if not elsewhere(key)])
def test_every_declared_key_is_read(reads, key, require):
    if key.endswith("environment[gem].id"):
        require("gem", "plays one of its environments by id")
    if place_of(key) not in reads:
        assert key in EXEMPT, f"nothing reads {key}: a recipe may set it, and nothing happens"
    else:
        assert key not in EXEMPT, f"{key} is read: it needs no exemption"


def test_reads_by_the_configuration_itself_and_by_tests_do_not_count(monkeypatch):
    recipe = grpo()
    found = Reads(monkeypatch)
    config = RunConfig.model_validate(recipe)
    assert config.seed == 0
    assert config.stages[0].optimizer_steps
    assert not found.seen
    freeze(config)
    assert (RunConfig, "device") in found.seen
    assert (RunConfig, "seed") not in found.seen


# --- what each key changes


def judge(trajectory, task):
    """Anything that differs between attempts; every third task is too easy to tell them apart."""
    if int(task.answer) % 3 == 0:
        return 1.0
    return int(trajectory.tokens[trajectory.owner == Owner.POLICY].sum()) % 5 / 4


def seldom(trajectory, task):
    """As above, but of most tasks all attempts are alike."""
    return judge(trajectory, task) if int(task.answer) % 5 == 1 else 0.0


SELDOM = [{"kind": f"{__name__}:seldom"}]


def grpo() -> dict:
    return {
        "threads": 1,
        "device": "cpu",
        "model": TINY,
        "tokenizer": {"kind": "characters", "alphabet": "0123456789+="},
        "stages": [{
            "name": "probe",
            "algorithm": {"kind": "grpo", "group_size": 4, "epochs": 2},
            "environment": {"kind": "arithmetic", "digits": 1},
            "rewards": [{"kind": f"{__name__}:judge"}],
            "generator": {"kind": "engine", "row_multiple": 1},
            "sampling": {"max_new_tokens": 8},
            "optimizer": {"lr": 0.02},
            "evaluation": {"tasks": 0},
            "steps": 2, "batch_size": 6,
        }],
    }  # fmt: skip


@pytest.fixture
def sft(tmp_path):
    questions(tmp_path / "questions.jsonl")
    recipe = grpo()
    recipe["tokenizer"] = {"kind": "characters"}
    recipe["stages"][0] |= {
        "algorithm": {"kind": "sft"},
        "environment": {"kind": "gsm8k", "train": str(tmp_path / "questions.jsonl"), "shots": 2},
    }
    return recipe


def changed(recipe: dict, **values) -> dict:
    """With keys of its one stage set: algorithm__clip_low=0.1."""
    recipe = copy.deepcopy(recipe)
    for key, value in values.items():
        *path, last = key.split("__")
        section = recipe["stages"][0]
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return recipe


def outcome(recipe: dict, poison: bool = False) -> SimpleNamespace:
    """What a run came to: metrics by step and optimizer step, the batches' tokens, and the weights
    that it left."""
    config = RunConfig.model_validate(recipe)
    policy = build_policy(config)
    run = build_run(config, 0, policy)
    if poison:
        with torch.no_grad():
            next(policy.model.parameters()).fill_(torch.nan)
    updates, tokens, starts = [], [], []
    measure, draw = run.measure, run.batcher.next

    def measured(role, numbers):
        if role == "policy":
            updates.append(dict(numbers))
        measure(role, numbers)

    async def drawn(step):
        starts.append(step)
        groups = await draw(step)
        tokens.append([[t.tokens.tolist() for t in group.trajectories] for group in groups])
        return groups

    run.measure, run.batcher.next = measured, drawn
    error = None
    try:
        asyncio.run(train(run))
    except TrainingError as raised:
        error = raised
    weights = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    state = run.roles["policy"].optimizer.state
    averages = {name: kept["average"].tolist() for name, kept in state.items() if "average" in kept}
    return SimpleNamespace(
        updates=updates,
        tokens=tokens,
        steps=len(starts),
        error=error,
        weights=weights,
        averages=averages,
    )


def steps_before_giving_up(limit: int) -> int:
    recipe = changed(grpo(), algorithm={"kind": "sft"}, steps=4, learner__max_bad_steps=limit)
    done = outcome(recipe, poison=True)
    assert done.error is not None
    return done.steps


def compared(done: SimpleNamespace, what: str):
    if what == "lr" or what in done.updates[0]:
        return [numbers[what] for numbers in done.updates]
    if what == "averages":
        return done.averages
    whole = {
        "tokens": done.tokens,
        "first tokens": done.tokens[0],
        "steps": done.steps,
        "updates": len(done.updates),
    }
    return done.weights.tolist() if what == "weights" else whole[what]


# key, two values, what they change, and the keys without which they would not.

# What algorithms do with their other keys is in tests/algorithms/test_knobs.py.
COPYING = {
    "kind": "message_log",
    "interface": "experience.copying_env:Copying",
    "data": "experience.copying_env:samples",
}
GRPO_KNOBS = [
    ("algorithm__minibatches", 1, 3, "updates", {}),
    ("algorithm__epochs", 1, 3, "updates", {}),
    ("algorithm__group_size", 2, 4, "tokens", {}),
    ("algorithm__equal_rewards", "keep", "drop", "grad_norm", {}),
    ("optimizer__lr", 0.01, 0.02, "lr", {}),
    ("optimizer__lr", 0.01, 0.02, "weights", {}),
    ("optimizer__betas", [0.9, 0.95], [0.5, 0.95], "weights", {}),
    ("optimizer__betas", [0.9, 0.95], [0.9, 0.5], "weights", {}),
    ("optimizer__eps", 1e-8, 1e-2, "weights", {}),
    ("optimizer__weight_decay", 0.0, 0.1, "weights", {}),
    ("optimizer__max_grad_norm", 1e-3, None, "weights", {"optimizer__eps": 1e-2}),
    ("optimizer__warmup_steps", 0, 3, "lr", {}),
    ("optimizer__warmup_share", 0.0, 0.5, "lr", {}),
    ("optimizer__schedule", "constant", "linear", "lr", {}),
    ("optimizer__schedule", "linear", "cosine", "lr", {}),
    ("optimizer__decay_steps", 1, 2, "lr", {"optimizer__schedule": "wsd"}),
    ("optimizer__ema_decay", 0.5, 0.9, "averages", {}),
    ("optimizer__kind", "adamw", "muon", "weights", {}),
    ("optimizer__momentum", 0.5, 0.9, "weights", {"optimizer__kind": "muon"}),
    ("optimizer__min_lr_ratio", 0.0, 0.5, "lr", {"optimizer__schedule": "linear"}),
    ("sampling__temperature", 0.2, 1.0, "first tokens", {}),
    ("sampling__top_p", 0.3, 1.0, "first tokens", {}),
    ("sampling__top_k", 0, 2, "first tokens", {}),
    ("sampling__min_p", 0.0, 0.9, "first tokens", {}),
    ("sampling__max_new_tokens", 4, 8, "first tokens", {}),
    ("sampling__stop", [], ["1", "2", "3"], "first tokens", {}),
    ("sampling__structured", None, {"regex": "[0-9]"}, "first tokens", {}),
    ("generator__max_context", None, 6, "first tokens", {}),
    ("examples", 1, None, "tokens", {}),
    ("batch_size", 3, 6, "tokens", {}),
    ("rollouts__max_replaced", 1, 3, "tokens", {"rollouts__dynamic_sampling": True, "rewards": SELDOM}),
    ("rollouts__group_filter", None, {"kind": "reward_std", "above": 0.1}, "tokens", {"rewards": SELDOM}),
    ("rollouts__tail_batching", 0, 2, "tokens", {"sampling__max_new_tokens": 60, "sampling__stop": ["1"]}),
    ("rollouts__adaptive", None, {"staleness": 0.5}, "tokens", {"rollouts__max_staleness": 1}),
    ("rollouts__replay", None, {"groups": 2}, "weights", {"algorithm__correction": {}}),
    ("rollouts__history_window", None, 1, "tokens", {"environment": COPYING, "rewards": []}),
    ("curriculum", None, {"prefer": "hard"}, "tokens", {"examples": 8}),
    ("steps", 1, 2, "steps", {}),
]  # fmt: skip
SFT_KNOBS = [
    ("algorithm__train", "all", "last", "loss", {}),
]


def assert_knob_turns(recipe, key, low, high, what, around):
    a, b = (
        compared(outcome(changed(recipe, **{**around, key: value})), what) for value in (low, high)
    )
    assert a != b, f"{key.replace('__', '.')}={low} and {high} give the same {what}"


@pytest.mark.medium
@pytest.mark.parametrize(("key", "low", "high", "what", "around"), GRPO_KNOBS)
def test_a_knob_of_rollouts_changes_what_it_says(key, low, high, what, around):
    assert_knob_turns(grpo(), key, low, high, what, around)


@pytest.mark.parametrize(("key", "low", "high", "what", "around"), SFT_KNOBS)
def test_a_knob_of_rows_changes_what_it_says(sft, key, low, high, what, around):
    assert_knob_turns(sft, key, low, high, what, around)


def test_frozen_weights_of_the_model_stay_in_a_run():
    recipe = grpo()
    recipe["model"] = {**TINY, "freeze": ["*norm.weight", "*.mlp"]}
    names = dict(build_policy(RunConfig.model_validate(recipe)).model.named_parameters())
    start = build_policy(RunConfig.model_validate(grpo())).model.named_parameters()
    sizes = [len(p.flatten()) for p in names.values()]
    after = outcome(recipe).weights.split(sizes)
    for (name, before), weights in zip(start, after, strict=True):
        is_frozen = name.endswith("norm.weight") or ".mlp." in name
        assert torch.equal(before.detach().flatten(), weights) == is_frozen, name


def test_max_bad_steps_is_how_many_are_borne():
    assert [steps_before_giving_up(limit) for limit in (1, 2, 3)] == [1, 2, 3]


def test_a_knob_of_rewards_changes_the_reward():
    assert graded("numeric_answer") == 1.0
    assert graded("numeric_answer", require_marker=True) == 0.0
    assert graded("numeric_answer", weight=0.5) == 0.5
    assert graded("countdown") == 0.0
    assert graded("countdown", partial=0.25) == 0.25


def test_every_knob_of_the_tables_sections_is_turned():
    sections = (
        "optimizer[adamw]",
        "optimizer[muon]",
        "sampling",
        "learner[local]",
        "generator[engine]",
    )
    turned = (
        {key for key, *_ in GRPO_KNOBS} | {key for key, *_ in COSTS} | {"learner__max_bad_steps"}
    )
    for path in leaf_keys(RunConfig):
        section, _, name = path.removeprefix("stages.").partition(".")
        # Nothing runs at a commit of this loop, and its engine has no weights of its own.
        if section in sections and not path.endswith(("[engine].keep_kv", "[engine].quantise")):
            assert f"{section.partition('[')[0]}__{name}" in turned, path


# --- what costs time or memory, and changes no result


@pytest.fixture
def costs(monkeypatch) -> dict[str, int]:
    """Counts of what those keys bound, while a run goes on."""
    seen = {
        "microbatches": 0,
        "recomputed": 0,
        "varlen": 0,
        "chunk_rows": 0,
        "prefills": 0,
        "running": 0,
        "odd_rows": 0,
        "jobs": 0,
    }

    def count(owner, name, note):
        original = getattr(owner, name)

        def noted(*arguments, **named):
            note(*arguments, **named)
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, noted)

    def add(key, number=lambda *a, **k: 1):
        return lambda *a, **k: seen.update({key: seen[key] + number(*a, **k)})

    def most(key, number):
        return lambda *a, **k: seen.update({key: max(seen[key], number(*a, **k))})

    count(Forward, "outputs", add("microbatches"))
    count(ratchet.models.decoder, "checkpoint", add("recomputed"))
    count(
        ratchet.learners.compute.forward,
        "compute_token_columns",
        most("chunk_rows", lambda head, *a: head.chunk_rows),
    )
    monkeypatch.setattr(varlen, "has_varlen", lambda device: True)
    count(PackedAttention, "__init__", add("varlen", lambda *a, uses_varlen: uses_varlen))
    count(ThreadPool, "run", most("jobs", lambda crew, jobs: len(jobs)))
    count(ModelRunner, "prefill", add("prefills"))
    count(ModelRunner, "begin_decode", most("running", lambda runner, requests: len(requests)))
    count(
        Decoder,
        "forward",
        add("odd_rows", lambda _, rows, *a, **k: torch.is_inference_mode_enabled() * len(rows) % 8),
    )
    return seen


# key, value, other value, what counts it, its relation to the first. Sums are taken in another
# order where `close`.
COSTS = [
    ("learner__micro_batch_tokens", "auto", 20, "microbatches", lambda a, b: b > 4 * a, True),
    ("learner__workers", 1, 3, "jobs", lambda a, b: (a, b) == (1, 3), True),
    ("learner__activation_checkpointing", False, True, "recomputed", lambda a, b: a == 0 < b, False),
    ("learner__logprob_chunk_mib", 256, 1, "chunk_rows", lambda a, b: a // 256 == b == 2**20 // (24 * 4), False),
    ("learner__attention", "auto", "padded", "varlen", lambda a, b: a > b == 0, True),
    ("generator__prefill_tokens", 2048, 8, "prefills", lambda a, b: b > a, False),
    ("generator__max_running", 1024, 5, "running", lambda a, b: a > b == 5, False),
    ("generator__kv_cache_gib", "auto", 2e-4, "running", lambda a, b: a > b > 0, False),
    ("generator__row_multiple", 1, 8, "odd_rows", lambda a, b: a > 0 == b, True),
]  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize(("key", "usual", "other", "counter", "related", "close"), COSTS)
def test_a_knob_of_cost_reaches_its_place_and_changes_no_result(
    costs, key, usual, other, counter, related, close
):
    done, counted = [], []
    for value in (usual, other):
        costs[counter] = 0
        done.append(outcome(changed(grpo(), **{key: value, "steps": 1})))
        counted.append(costs[counter])
    assert related(*counted), f"{key.replace('__', '.')}={usual} and {other}: {counter} {counted}"
    a, b = done
    assert a.tokens == b.tokens
    for x, y in zip(a.updates, b.updates, strict=True):
        # between two roundings: as good as any below 1e-6
        gaps = [u.pop("policy_gradient/sampler_gap") for u in (x, y)]
        assert max(gaps) < 1e-6
        assert x == (pytest.approx(y, rel=1e-4, abs=1e-6) if close else y)
    if not close:
        assert torch.equal(a.weights, b.weights)
