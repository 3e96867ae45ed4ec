"""Images in message logs, read by every function that plays batches."""

import asyncio

import pytest
import torch
from experience.counting import Batched
from experience.test_interop_training import Showing, show
from pictures import asked, picture, renderer

from ratchet.errors import ConfigError, DataError
from ratchet.experience.nemo_rl import BatchedDataDict, WithSampling, collate, make_datum
from ratchet.experience.nemo_rl.rollouts import (
    async_generate_response_for_sample_turn,
    generate_responses,
    generate_responses_async,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
    run_sample_multi_turn_rollout,
)
from ratchet.testing.fakes import FakeGenerator
from ratchet.types import Sampling

READ = renderer()
ANSWER = [*READ.tokenizer.encode("a"), READ.stop_ids[0]]
ENVIRONMENTS = {"showing": Showing()}
LIMITS = {"max_seq_len": 256, "max_rollout_turns": 4}


class Looking(Batched):
    """A batch generator that reads media."""

    reads_media = True

    def __init__(self):
        super().__init__(lambda *_: ANSWER)
        self.media = []

    def generate(self, data, greedy=False):
        self.media += data["media"]
        return super().generate(data, greedy)


def looking(kind):
    if kind == "batches":
        return Looking(), lambda policy: policy.media
    fake = FakeGenerator(lambda *_: ANSWER)
    return WithSampling(fake, Sampling()), lambda _: fake.media


def sample():
    return make_datum([show("prompt")], READ, task_name="showing")


def check_media(log, media):
    """Each medium is where its tokens are."""
    tokens = torch.cat([entry["token_ids"] for entry in log])
    for placed in media:
        span = tokens[placed.start : placed.start + placed.medium.span]
        assert READ.processor.media_token_ids & set(span.tolist())


@pytest.mark.parametrize("kind", ["tokens", "batches"])
@pytest.mark.parametrize("rollout", [run_multi_turn_rollout, run_async_multi_turn_rollout])
def test_prompts_and_observations_have_images(rollout, kind):
    policy, seen = looking(kind)
    batch, metrics = rollout(policy, collate([sample(), sample()]), READ, ENVIRONMENTS, **LIMITS)
    assert batch["failed"] == [None, None]
    assert metrics["total_turns"] == 4
    assert sorted(len(media) for media in seen(policy)) == [1, 1, 2, 2]
    for log in batch["message_log"]:
        roles = [entry["role"] for entry in log]
        assert roles == ["user", *["assistant", "environment"] * 2]
        assert log[2]["content"][0]["type"] == "image"
        check_media(log, next(media for media in seen(policy) if len(media) == 2))


def test_one_sample_has_images():
    policy, seen = looking("tokens")
    state, metrics = asyncio.run(
        run_sample_multi_turn_rollout(0, sample(), policy, READ, ENVIRONMENTS, **LIMITS)
    )
    assert metrics["turn_count"] == 2
    check_media(state["message_log"], seen(policy)[1])


@pytest.mark.parametrize("kind", ["tokens", "batches"])
def test_single_turns_read_the_images_of_their_logs(kind):
    async def alone(policy, log):
        await async_generate_response_for_sample_turn(policy, log, None, READ, 256)

    def together(respond):
        def play(policy, log):
            tokens = log[-1]["token_ids"]
            lengths = torch.tensor([len(tokens)])
            data = BatchedDataDict({"input_ids": tokens[None], "input_lengths": lengths})
            return respond(policy, data, BatchedDataDict({"message_log": [log]}), READ, lengths)

        return play

    for play in (alone, together(generate_responses_async), together(generate_responses)):
        policy, seen = looking(kind)
        log = sample()["message_log"]
        played = play(policy, log)
        if asyncio.iscoroutine(played):
            asyncio.run(played)
        assert [len(media) for media in seen(policy)] == [1]
        assert log[-1]["content"] == "a"


def test_a_generator_or_tokenizer_without_media_is_refused():
    blind = Batched(lambda *_: ANSWER)
    for rollout in (run_multi_turn_rollout, run_async_multi_turn_rollout):
        with pytest.raises(ConfigError, match=r"Batched does not read.*reads_media=True"):
            rollout(blind, collate([sample()]), READ, ENVIRONMENTS, **LIMITS)
    with pytest.raises(DataError, match="the model reads only text"):
        make_datum([show("prompt")], READ.tokenizer)


def test_media_in_the_content_of_logs_become_inputs_of_the_model():
    messages = [asked(picture(1), picture(2), "which?"), asked("none"), asked(picture(1))]
    media = [READ.media(READ.prompt([m]), [m]) for m in messages]
    batch = BatchedDataDict({"media": media, "mm_token_type_ids": torch.zeros(3, 5)})
    packed = batch.get_multimodal_dict()
    assert packed["pixel_values"].logical_segment_counts_by_row() == [2, 0, 1]
    assert len(packed["pixel_values"].tensors) == 2  # the last row's picture is the first row's
    inputs = batch.get_multimodal_dict(as_tensors=True, device="meta", pixel_dtype=torch.bfloat16)
    assert {name: tensor.device.type for name, tensor in inputs.items()} == dict.fromkeys(
        ("pixel_values", "image_grid_thw", "mm_token_type_ids"), "meta"
    )
    assert inputs["pixel_values"].dtype == torch.bfloat16
    assert inputs["image_grid_thw"].dtype == torch.int64
    joined = batch.get_multimodal_dict(as_tensors=True)["pixel_values"]
    expected = [p.medium.inputs["pixel_values"] for row in media for p in row]
    assert torch.equal(joined, torch.cat([torch.from_numpy(x) for x in expected]))
