"""Groups that environments of Atropos play: what becomes of their tokens, masks and scores."""

import asyncio
import re
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from experience.atropos import stand_in
from experience.openai_proxy.talk import EOS, RENDERER, Scripted, sampling

from ratchet.config.resolve import build, resolve
from ratchet.errors import ConfigError, DataError
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.training.sources import make_manager_with_player
from ratchet.training.stage import EnvSetup
from ratchet.types import Failed, Owner, Scored, Truncated

pytestmark = pytest.mark.needs("openai")

LETTERS = "experience.atropos.stand_in:Letters"


@pytest.fixture(autouse=True)
def _atropos(monkeypatch):
    stand_in.install(monkeypatch)


def make(path=LETTERS, **keys):
    return build(resolve("environment", {"kind": "atropos", "path": path, "test_tasks": 2, **keys}))


def make_manager(environment, generator=None, *, retries=0, **limits):
    generator = generator or Scripted(["a", "aba", "b", "caa"])
    player = EpisodePlayer(generator, RENDERER, **{"max_context": 4096, **limits})
    rollouts = SimpleNamespace(attempt_timeout_s=None, retries=retries)
    return make_manager_with_player(
        player, RENDERER, EnvSetup(environment), None, rollouts, needs_reward=True
    )


def play(environment, generator=None, *, split="train", attempts=3, greedy=False, **limits):
    manager = make_manager(environment, generator, **limits)
    task = next(environment.tasks(split, seed=0))
    return asyncio.run(
        manager.group(task, sampling(), group_id="g", attempts=attempts, greedy=greedy)
    )


def test_a_group_has_the_recorded_tokens_and_the_scores_of_the_environment():
    generator = Scripted(["a", "aba", "b"])
    group = play(make(), generator)
    assert [row.attempt for row in group.trajectories] == [0, 1, 2]
    assert [row.outcome for row in group.trajectories] == [Scored(1.0), Scored(2.0), Scored(0.0)]
    for row, completion, text in zip(
        group.trajectories, generator.completions, ["a", "aba", "b"], strict=True
    ):
        prompt = RENDERER.tokenizer.encode("<user>word 2<assistant>")
        assert row.tokens.tolist() == [*prompt, *RENDERER.tokenizer.encode(text), EOS]
        is_policy = row.owner == Owner.POLICY
        assert (row.trainable == is_policy).all()
        assert is_policy.sum() == len(text) + 1
        assert np.array_equal(row.rollout_logprobs[is_policy], completion.logprobs)
        assert np.array_equal(row.versions[is_policy], completion.versions)


def test_chats_are_found_by_their_tokens_though_the_template_ends_them_otherwise():
    group = play(make("experience.atropos.stand_in:Chats"))
    assert [row.outcome for row in group.trajectories] == [Scored(1.0), Scored(3.0), Scored(1.0)]
    assert [row.messages[-1].text for row in group.trajectories] == ["a", "aba", "b"]


def test_continuations_of_a_text_are_recorded_too():
    group = play(make("experience.atropos.stand_in:Texts"))
    assert [row.outcome for row in group.trajectories] == [Scored(1.0), Scored(3.0), Scored(1.0)]
    assert [int((row.owner == Owner.POLICY).sum()) for row in group.trajectories] == [2, 4, 2]


def test_an_answer_that_a_limit_cut_off_is_truncated_with_its_score():
    environment = make("experience.atropos.stand_in:Chats")
    prompt = RENDERER.prompt(stand_in.messages_of("word 2"))
    group = play(environment, max_context=len(prompt) + 2)
    assert [row.outcome for row in group.trajectories] == [
        Scored(1.0),
        Truncated(2.0),
        Scored(1.0),
    ]


def test_held_out_items_are_the_first_and_never_train():
    environment = make()
    tasks = [*environment.tasks("test", seed=0), *islice(environment.tasks("train", seed=0), 4)]

    async def list_words():
        items = [await environment.items.find(t.meta["split"], t.meta["index"]) for t in tasks]
        return [item["word"][-1] for item in items]

    # Of five items two are held out; the third pass begins at the fourth training task.
    assert asyncio.run(list_words()) == ["0", "1", "2", "3", "4", "2"]


def test_an_item_that_the_environment_changes_is_played_as_it_was_drawn():
    environment = make(config={"flaw": "changes"})
    manager = make_manager(environment, Scripted(["a"] * 9))
    tasks = [*environment.tasks("test", seed=0), *islice(environment.tasks("train", seed=0), 4)]

    async def play_all():
        texts = []
        for task in [*tasks, tasks[0]]:
            group = await manager.group(task, sampling(), group_id="g", attempts=1)
            tokens = group.trajectories[0].tokens.tolist()
            texts.append(RENDERER.tokenizer.decode(tokens, skip_special=True))
        return [re.search("word (.*)<assistant>", text)[1] for text in texts]

    # The fourth training task is not the first held-out item, which was played before.
    assert asyncio.run(play_all()) == ["0", "1", "2", "3", "4", "2", "0"]


def test_a_resumed_run_goes_on_with_the_same_items():
    (first,) = islice(make().tasks("train", seed=0, start=2), 1)
    assert (first.id, first.meta["index"]) == (f"{LETTERS}/train/2", 2)
    environment = make()
    manager = make_manager(environment)
    group = asyncio.run(manager.group(first, sampling(), group_id="g", attempts=1))
    text = RENDERER.tokenizer.decode(group.trajectories[0].tokens.tolist(), skip_special=True)
    assert text.startswith("<user>word 4")


def test_a_greedy_baseline_is_a_group_of_its_own():
    group = play(make(ignore=["temperature"]), attempts=2, greedy=True)
    assert [(row.use, row.temperature) for row in group.trajectories] == [
        ("train", 1.0),
        ("train", 1.0),
        ("baseline", 0.0),
    ]


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("raises", "the judge is down"),
        ("drops", "dropped the group"),
        ("backlog", "1 items for its backlog"),
        ("short", "3 tokens, 3 masks and 2 scores"),
        ("named", "Return lists in one order"),
        ("advantages", "advantages, which are not supported"),
        ("overrides", "set_advantage_to_zero"),
        ("cold", r"temperature=0.5, but .* environment.ignore=\[temperature\]"),
    ],
)
def test_a_flawed_group_fails_and_gives_no_reward(flaw, said):
    group = play(make(config={"flaw": flaw}))
    assert len(group.trajectories) == 3
    for row in group.trajectories:
        assert isinstance(row.outcome, Failed), row.outcome
        assert row.outcome.kind == "environment"
        assert_matches(row.outcome.detail, said)


def assert_matches(detail, said):
    assert f"{LETTERS}/train/0" in detail
    assert re.search(said, detail), detail


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("nan", "score is nan"),
        ("foreign", "not those that the policy read and wrote"),
        ("mask", "trains tokens of others"),
        ("unmasked", "trains no token"),
    ],
)
def test_a_flawed_sequence_fails_its_own_attempt(flaw, said):
    group = play(make(config={"flaw": flaw}))
    failed, *others = (row.outcome for row in group.trajectories)
    assert isinstance(failed, Failed)
    assert_matches(failed.detail, f"sequence 0: .*{said}")
    assert others == [Scored(2.0), Scored(0.0)]


def test_a_sequence_that_is_given_twice_counts_once():
    group = play(make(config={"flaw": "twice"}))
    assert sum(isinstance(row.outcome, Failed) for row in group.trajectories) == 1


def test_a_prompt_longer_than_the_context_is_named():
    (row,) = play(make(), attempts=1, max_context=4).trajectories
    assert isinstance(row.outcome, Failed)
    assert row.outcome.kind == "prompt_too_long"


def test_an_environment_that_hangs_is_stopped():
    generator = Scripted(["a"])

    async def hang():
        generator.hold = asyncio.Event()
        environment = make()
        manager = make_manager(environment, generator, timeout_s=0.05)
        task = next(environment.tasks("train", seed=0))
        return await manager.group(task, sampling(), group_id="g", attempts=2)

    group = asyncio.run(hang())
    assert [row.outcome.kind for row in group.trajectories] == ["timeout", "timeout"]


def test_an_error_of_the_generator_ends_the_run():
    class Broken(Scripted):
        async def generate(self, tokens, sampling, media=()):
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        play(make(), Broken())


def test_unknown_keys_wrong_classes_and_other_tokenizers_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"config\.flow: Config has no such field"):
        make(config={"flow": "x"})
    with pytest.raises(ConfigError, match="has no method config_init"):
        make("experience.atropos.stand_in:Config")
    monkeypatch.setattr(stand_in.Tokenizer, "encode", lambda *_, **__: [1])
    with pytest.raises(ConfigError, match="tokenizer_name"):
        make_manager(make())
    with pytest.raises(DataError, match="plays whole groups"):
        asyncio.run(make().step(stand_in.messages_of("a")[0]))


def test_a_test_split_of_all_items_is_refused():
    group = play(make(test_tasks=5))
    assert_matches(group.trajectories[0].outcome.detail, "all items .* are held out")
