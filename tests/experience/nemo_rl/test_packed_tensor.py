"""Columns whose rows have no or several images: packed, shared by rows, and joined for a model."""

import copy
import pickle

import pytest
import torch

from ratchet.errors import DataError
from ratchet.experience.nemo_rl import BatchedDataDict, PackedTensor
from ratchet.experience.nemo_rl.packed_media import pack_logs
from ratchet.experience.nemo_rl.specs import as_message
from ratchet.experience.nemo_rl.tokens import find_media


def image(value, patches=1):
    return torch.full((patches, 2), float(value))


def column(*values):
    return PackedTensor([None if v is None else image(v) for v in values], dim_to_pack=0)


def read(packed):
    """The first number of each patch."""
    tensor = packed.as_tensor()
    return [] if tensor is None else tensor[:, 0].tolist()


def test_rows_without_media_are_kept_through_every_operation():
    packed = column(1, None, 3)
    assert read(packed.slice(torch.tensor([1, -1, 0]))) == [3, 1]
    assert [t is None for t in packed.slice([1, 2]).tensors] == [True, False]
    joined = PackedTensor.concat([packed, PackedTensor.empty_rows_like(packed, 2)])
    assert joined.logical_segment_counts_by_row() == [1, 0, 1, 0, 0]
    flat = PackedTensor.flattened_concat([packed, column(None), column(4)])
    assert flat.logical_segment_counts_by_row() == [2, 0, 1]
    assert [None if t is None else t[:, 0].tolist() for t in flat.tensors] == [[1, 3], None, [4]]
    assert PackedTensor.empty_like(packed).as_tensor() is None


def test_shared_segments_are_stored_once_and_survive_processes():
    prompt = column(1).enable_deduplication()
    # Two attempts of one prompt, in processes of their own, each with an observation.
    attempts = [
        pickle.loads(pickle.dumps(PackedTensor.merge_segments([copy.deepcopy(prompt), column(v)])))
        for v in (2, 3)
    ]
    assert attempts[0].tensors[0] is not attempts[1].tensors[0]
    packed = PackedTensor.concat(attempts)
    assert read(packed) == [1, 2, 1, 3]
    assert len(packed.tensors) == 3
    halves = packed.to_dtype(torch.float16)
    assert (len(halves.tensors), packed.tensors[0].dtype) == (3, torch.float32)
    assert packed.to("meta") is packed
    assert {tensor.device.type for tensor in packed.tensors} == {"meta"}
    assert len(pickle.dumps(halves.slice([0, 0, 0, 0]))) < 1.5 * len(
        pickle.dumps(halves.slice([0]))
    )


def test_repeated_rows_share_media_where_asked():
    entry = {"role": "user", "content": "", "pixel_values": column(1), "other": image(2)}
    sound = torch.zeros(4)
    batch = BatchedDataDict({"message_log": [[entry]], "vllm_audios": [[(sound, 16_000)]]})
    for share in (False, True):
        first, second = batch.repeat_interleave(2, share_immutable_media=share)["message_log"]
        assert (
            first[0]["pixel_values"].tensors[0] is second[0]["pixel_values"].tensors[0]
        ) is share
        assert first[0]["other"] is not second[0]["other"]
    audios = batch.repeat_interleave(2, share_immutable_media=True)["vllm_audios"]
    assert audios[0][0][0] is audios[1][0][0] is sound
    assert len(pack_logs([first, second])["pixel_values"].tensors) == 1


def test_batches_carry_packed_columns():
    batch = BatchedDataDict({"row": torch.arange(4), "pixel_values": column(0, None, 2, 3)})
    assert [read(part["pixel_values"]) for part in batch.make_microbatch_iterator(2)] == [
        [0],
        [2, 3],
    ]
    assert read(batch.repeat_interleave(2)["pixel_values"]) == [0, 0, 2, 2, 3, 3]
    assert read(copy.deepcopy(batch).reorder_data([3, 2, 1, 0])["pixel_values"]) == [3, 2, 0]
    assert batch.to("cpu").get_multimodal_dict().keys() == {"pixel_values"}
    text = {"row": torch.tensor([4])}
    with pytest.raises(KeyError, match="column 'pixel_values' is missing from batch 1"):
        BatchedDataDict.from_batches([batch, text])
    whole = BatchedDataDict.from_batches([text, batch], allow_missing_packed_tensors=True)
    assert whole["pixel_values"].logical_segment_counts_by_row() == [0, 1, 0, 1, 1]


def test_padding_puts_each_segment_at_the_front_of_its_place():
    tall, wide = torch.ones(1, 3, 1), 2 * torch.ones(2, 1, 2)
    packed = PackedTensor([tall, wide], dim_to_pack=0, pad_to_max_shape=True).as_tensor()
    assert packed.tolist() == [[[1, 0], [1, 0], [1, 0]], *[[[2, 2], [0, 0], [0, 0]]] * 2]


SHARED = column(1).enable_deduplication()
PACKED_ALONE = {"role": "user", "content": "see", "token_ids": torch.ones(1), "pixels": column(1)}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: PackedTensor([], 0), "must be a tensor, or a non-empty list"),
        (lambda: PackedTensor([1.0], 0), "must be a tensor, or a non-empty list"),
        (lambda: column(1).slice([1]), "row 1 is not in a PackedTensor of 1 rows"),
        (lambda: PackedTensor.empty_rows_like(column(1), -1), "num_rows=-1"),
        (lambda: PackedTensor.concat([]), "at least one"),
        (
            lambda: PackedTensor.concat([column(1), PackedTensor(image(1), dim_to_pack=1)]),
            r"equal \(dim_to_pack",
        ),
        (
            lambda: PackedTensor([torch.ones(1, 2), torch.ones(1, 3)], 0).as_tensor(),
            r"shapes \(1, 2\) and \(1, 3\).*pad_to_max_shape=True",
        ),
        (lambda: PackedTensor([torch.ones(1, 2), torch.ones(1)], 0).as_tensor(), "same rank"),
        (lambda: PackedTensor(torch.ones(2), 1).as_tensor(), "dim_to_pack=1 is invalid"),
        (
            lambda: BatchedDataDict(
                {
                    "pixel_values": PackedTensor.merge_segments([SHARED, SHARED]),
                    "image_grid_thw": column(1),
                }
            ).get_multimodal_dict(as_tensors=True),
            r"'image_grid_thw' must have the same .* counts: they have \[2\] and \[1\]",
        ),
        (
            lambda: pack_logs([[{"a": column(1)}, {"a": "text"}]]),
            "'a' is a PackedTensor in some messages, and another value in message_log 0",
        ),
        (
            lambda: BatchedDataDict.from_batches([{"a": column(1)}, {"a": torch.ones(1)}]),
            "'a' is a tensor in one batch and a PackedTensor in another",
        ),
        (lambda: as_message(PACKED_ALONE), "'pixels' as a PackedTensor and only text"),
        (lambda: find_media([PACKED_ALONE], [1], None), "only text"),
    ],
)
def test_what_can_t_be_packed_says_so(broken, message):
    with pytest.raises(DataError, match=message):
        broken()
