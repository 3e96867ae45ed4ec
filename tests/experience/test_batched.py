"""BatchedDataDict, by hand."""

import pytest
import torch
from learners.ranks import run_ranks

from ratchet.errors import DataError
from ratchet.experience.nemo_rl import BatchedDataDict, DatumSpec, PackedTensor, collate


def letters(text="ABCD"):
    return BatchedDataDict({"name": list(text), "place": torch.arange(len(text))})


def test_batches_end_to_end_with_padding_on_the_right():
    first = BatchedDataDict(
        {"ids": torch.tensor([[1, 2]]), "name": ["a"], "score": torch.tensor([0.5])}
    )
    second = {
        "ids": torch.tensor([[3, 4, 5], [6, 7, 8]]),
        "name": ["b", "c"],
        "score": torch.tensor([1.0, 2.0]),
    }
    whole = BatchedDataDict.from_batches([first, second, {"name": []}], pad_value_dict={"ids": 9})
    assert whole["ids"].tolist() == [[1, 2, 9], [3, 4, 5], [6, 7, 8]]
    assert whole["name"] == ["a", "b", "c"]
    assert whole["score"].tolist() == [0.5, 1.0, 2.0]
    assert whole.size == 3
    deep = [{"x": torch.ones(1, 1, 2)}, {"x": torch.ones(1, 2, 2)}]
    assert BatchedDataDict.from_batches(deep)["x"].tolist() == [[[1, 1], [0, 0]], [[1, 1], [1, 1]]]
    assert BatchedDataDict.from_batches([]).size == 0


def test_rows():
    batch = letters()
    assert batch.size == 4
    assert batch.slice(1, 3)["name"] == ["B", "C"]
    assert batch.slice(1, 3)["place"].tolist() == [1, 2]
    assert batch.slice(2, 2).size == 0
    picked = batch.select_indices(torch.tensor([3, 0, 3]))
    assert (picked["name"], picked["place"].tolist()) == (["D", "A", "D"], [3, 0, 3])
    assert batch.select_indices([-1])["name"] == ["D"]
    assert batch.repeat_interleave(2)["name"] == list("AABBCCDD")
    assert batch.repeat_interleave(2)["place"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_each_repetition_grows_a_log_of_its_own():
    batch = BatchedDataDict({"message_log": [[{"role": "user"}]]}).repeat_interleave(2)
    batch["message_log"][0].append({"role": "assistant"})
    assert [len(log) for log in batch["message_log"]] == [2, 1]


def test_reorder_undoes_a_selection():
    order = [2, 0, 3, 1]
    batch = letters().select_indices(order)
    assert batch["name"] == ["C", "A", "D", "B"]
    assert batch.reorder_data(order) is batch
    assert (batch["name"], batch["place"].tolist()) == (list("ABCD"), [0, 1, 2, 3])


def test_equal_parts_of_consecutive_rows():
    batch = letters("ABCDEF")
    assert batch.chunk(1, 3)["name"] == ["C", "D"]
    assert batch.get_batch(2, 2)["place"].tolist() == [4, 5]
    assert [part["name"] for part in batch.make_microbatch_iterator(3)] == [
        list("ABC"),
        list("DEF"),
    ]
    assert batch.get_dict()["name"] == list("ABCDEF")
    batch["ids"] = torch.arange(12).reshape(6, 2)
    batch.truncate_tensors(1, 1)
    assert batch["ids"].tolist() == [[0], [2], [4], [6], [8], [10]]
    assert batch["place"].tolist() == [0, 1, 2, 3, 4, 5]


def test_shards():
    batch = letters("AABBCCDD")
    assert [shard["name"] for shard in batch.shard_by_batch_size(2)] == [list("AABB"), list("CCDD")]
    assert [shard["name"] for shard in batch.shard_by_batch_size(2, batch_size=4)] == [
        list("AACC"),
        list("BBDD"),
    ]
    assert [shard["name"] for shard in batch.shard_by_batch_size(2, batch_size=2)] == [
        list("ABCD"),
        list("ABCD"),
    ]
    uneven = letters("ABCDE").shard_by_batch_size(2, allow_uneven_shards=True)
    assert [shard["name"] for shard in uneven] == [list("ABC"), list("DE")]
    assert [
        shard.size for shard in letters("ABC").shard_by_batch_size(4, allow_uneven_shards=True)
    ] == [1, 1, 1, 0]


DYNAMIC = {
    "max_tokens_per_microbatch": 16,
    "sequence_length_round": 4,
    "input_key": "ids",
    "input_lengths_key": "length",
}
PACKED = {
    "max_tokens_per_microbatch": 12,
    "sequence_length_pad_multiple": 4,
    "input_key": "ids",
    "input_lengths_key": "length",
    "algorithm": "first_fit_decreasing",
}


def of_lengths(*lengths):
    n = len(lengths)
    return BatchedDataDict(
        {
            "ids": torch.arange(n * 10).reshape(n, 10),
            "length": torch.tensor(lengths),
            "row": list(range(n)),
        }
    )


def test_dynamic_micro_batches_are_cut_to_their_rounded_length():
    """By hand: sorted 1 2 3 3 5 9; dealt to two shards as 1 3 5 and 2 3 9, padded to 4 4 10."""
    batch = of_lengths(9, 1, 3, 2, 5, 3)
    shards, rows = batch.shard_by_batch_size(2, dynamic_batching_args=DYNAMIC)
    assert [shard["row"] for shard in shards] == [[1, 2, 4], [3, 5, 0]]
    assert rows == [1, 2, 4, 3, 5, 0]
    for shard in shards:
        assert shard.micro_batch_indices == [[[0, 2], [2, 3]]]
        assert shard.micro_batch_lengths == [[4, 10]], "12 is more than the columns have"
        micros = list(shard.make_microbatch_iterator_with_dynamic_shapes())
        assert [micro["ids"].shape for micro in micros] == [(2, 4), (1, 10)]
        assert shard.get_microbatch_iterator_dynamic_shapes_len() == 2
    with pytest.raises(DataError, match="multiples of 0: give 1 or more"):
        batch.shard_by_batch_size(2, dynamic_batching_args={**DYNAMIC, "sequence_length_round": 0})
    with pytest.raises(DataError, match="micro-batches of one chunk"):
        shards[0].reorder_data([2, 1, 0]).get_microbatch_iterator_dynamic_shapes_len()
    shards[0].reorder_data([2, 1, 0])
    restored = BatchedDataDict.from_batches(shards).reorder_data(rows)
    assert restored["row"] == batch["row"]
    assert torch.equal(restored["ids"], batch["ids"])


def test_packed_micro_batches_sum_to_their_padded_lengths():
    """By hand: 5 1 8 4 are padded to 8 4 8 4; bins of 12 are 8 + 4 twice, one a shard."""
    batch = of_lengths(5, 1, 8, 4)
    shards, rows = batch.shard_by_batch_size(2, sequence_packing_args=PACKED)
    assert rows == [0, 1, 2, 3]
    assert [shard.micro_batch_lengths for shard in shards] == [[[12]], [[12]]]
    assert shards[0].get_microbatch_iterator_for_packable_sequences_len() == (1, 12)
    in_order = {**PACKED, "algorithm": "concatenative"}
    (whole,), _ = of_lengths(5, 8, 1, 4).shard_by_batch_size(1, sequence_packing_args=in_order)
    assert whole.micro_batch_lengths == [[8, 12, 4]]
    micros = whole.make_microbatch_iterator_for_packable_sequences()
    assert [micro["row"] for micro in micros] == [[0], [1, 2], [3]]
    largest = {**in_order, "microbatch_order": "largest_first"}
    (whole,), _ = of_lengths(5, 8, 1, 4).shard_by_batch_size(1, sequence_packing_args=largest)
    assert whole["row"] == [1, 2, 0, 3]


def test_chunks_keep_their_rows_and_shards_have_as_many_micro_batches():
    batch = of_lengths(1, 1, 1, 9, 2, 2, 2, 2)
    shards, rows = batch.shard_by_batch_size(2, 4, sequence_packing_args=PACKED)
    for place, chunk in enumerate((range(4), range(4, 8))):
        parts = [shard.get_batch(place) for shard in shards]
        assert sorted(row for part in parts for row in part["row"]) == list(chunk)
        counts = [part.get_microbatch_iterator_for_packable_sequences_len()[0] for part in parts]
        assert len(set(counts)) == 1
    assert BatchedDataDict.from_batches(shards).reorder_data(rows)["row"] == batch["row"]
    with pytest.raises(DataError, match="micro-batches of one chunk"):
        list(shards[0].make_microbatch_iterator_for_packable_sequences())


def gathered(rank):
    """On one rank: rows of all ranks, whose numbers differ."""
    n = (2, 0, 1)[rank]
    batch = BatchedDataDict(
        {
            "ids": torch.full((n, 2), rank),
            "score": torch.arange(n, dtype=torch.float64) + rank,
            "log": [[{"role": "user", "token_ids": torch.tensor([rank])}] for _ in range(n)],
            "pixels": PackedTensor(torch.tensor([rank]), dim_to_pack=0).slice([0] * n),
        }
    )
    whole = batch.all_gather()
    assert whole["pixels"].as_tensor().tolist() == [0, 0, 2]
    logs = [int(log[0]["token_ids"]) for log in whole["log"]]
    return whole["ids"].tolist(), whole["score"].tolist(), logs


@pytest.mark.slow
def test_all_gather_joins_the_rows_of_ranks_in_order():
    for ids, scores, logs in run_ranks(3, "experience.test_batched:gathered"):
        assert ids == [[0, 0], [0, 0], [2, 2]]
        assert scores == [0.0, 1.0, 2.0]
        assert logs == [0, 0, 2]


def gathered_unlike(rank):
    """On one rank: columns whose order differs; and the errors if widths or lengths differ."""
    columns = {"ids": torch.full((1, 2), rank), "rank": torch.full((1, 2), 10 + rank)}
    ordered = dict(sorted(columns.items(), reverse=rank == 1))
    whole = BatchedDataDict(ordered).all_gather()
    with pytest.raises(DataError) as caught:
        BatchedDataDict({"ids": torch.zeros(1, 2 + rank)}).all_gather()
    with pytest.raises(DataError, match="columns of rank 1 must have one length, not"):
        BatchedDataDict({"ids": torch.zeros(2, 2), "log": [0] * (2 - rank)}).all_gather()
    return whole["ids"].tolist(), whole["rank"].tolist(), str(caught.value)


def test_all_gather_matches_columns_by_name_and_refuses_others():
    for ids, ranks, error in run_ranks(2, "experience.test_batched:gathered_unlike"):
        assert (ids, ranks) == ([[0, 0], [1, 1]], [[10, 10], [11, 11]])
        assert "'ids' is a tensor [B, 2] of torch.float32 on rank 0, and a tensor [B, 3]" in error


def test_to_moves_tensors_in_place():
    batch = letters()
    assert batch.to("meta") is batch
    assert batch["place"].device.type == "meta"
    assert batch["name"] == list("ABCD")


def test_samples_become_a_batch():
    rows = [
        DatumSpec(message_log=[], length=n, extra_env_info=None, loss_multiplier=1.0, idx=n)
        for n in (3, 5)
    ]
    batch = collate([rows[0], {**rows[1], "task_name": "sums"}])
    assert batch["length"].tolist() == [3, 5]
    assert batch["loss_multiplier"].dtype == torch.float32
    assert batch["task_name"] == [None, "sums"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: letters().select_indices([4]), "row 4 is not in a batch of 4"),
        (lambda: letters().slice(3, 5), "rows 3 to 5 are not in a batch of 4"),
        (lambda: letters().reorder_data([0, 0, 1, 2]), "must name each of the 4 rows once"),
        (lambda: letters().chunk(2, 2), "4 rows have no part 2 of 2 equal parts"),
        (lambda: letters().make_microbatch_iterator(3), "4 rows can't be cut into micro-batches"),
        (lambda: letters().truncate_tensors(0, 5), "column 'place' has 4 entries in dimension 0"),
        (lambda: letters().shard_by_batch_size(3), "can't be cut"),
        (lambda: letters().shard_by_batch_size(1, batch_size=3), "can't be cut"),
        (
            lambda: letters().shard_by_batch_size(2, batch_size=2, allow_uneven_shards=True),
            "Remove one",
        ),
        (
            lambda: BatchedDataDict.from_batches([letters(), {"name": ["E"]}]),
            "column 'place' is missing from batch 1",
        ),
        (
            lambda: BatchedDataDict.from_batches([{"a": [1]}, {"a": torch.ones(1)}]),
            "make them alike",
        ),
        (lambda: BatchedDataDict({"a": [1], "b": []}).size, "differ in length"),
        (lambda: letters().get_batch(0), "without micro-batches needs batch_size"),
        (
            lambda: of_lengths(1, 13).shard_by_batch_size(1, sequence_packing_args=PACKED),
            "a row of 16 tokens, rounded up, exceeds max_tokens_per_microbatch=12",
        ),
        (
            lambda: of_lengths(1).shard_by_batch_size(2, sequence_packing_args=PACKED),
            "1 rows can't fill 2 micro-batches",
        ),
        (
            lambda: of_lengths(1).shard_by_batch_size(
                1, sequence_packing_args={**PACKED, "microbatch_order": "smallest"}
            ),
            "microbatch_order='smallest' must be",
        ),
        (
            lambda: of_lengths(1).shard_by_batch_size(
                1, sequence_packing_args={**PACKED, "input_lengths_key": "size"}
            ),
            "input_lengths_key=size is not a column",
        ),
        (
            lambda: of_lengths(1).shard_by_batch_size(
                1, dynamic_batching_args={**DYNAMIC, "input_key": "tokens"}
            ),
            "input_key=tokens is not a column",
        ),
    ],
)
def test_what_has_no_answer_says_so(broken, message):
    with pytest.raises(DataError, match=message):
        broken()
