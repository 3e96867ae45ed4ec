"""A checksum finds every flip and every exchange, and is the same however it is computed."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.models.weights.checksums import (
    ROW_BYTES,
    SUMS,
    XXH3,
    _checksum,
    as_bytes,
    checksum,
    copy_with_checksum,
    has_checksum,
)

SIZES = [
    0,
    1,
    7,
    8,
    ROW_BYTES - 1,
    ROW_BYTES,
    ROW_BYTES + 1,
    3 * ROW_BYTES + 5,
    200 * ROW_BYTES + 24,
    600 * ROW_BYTES + 24,
]


def data(size, seed=0):
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("size", SIZES)
def test_an_accelerators_is_made_of_the_sums_of_rows_and_columns(size):
    """As the module says, by numpy: a CPU that is asked to compares by the same."""
    bytes_n = data(size).numpy()
    whole = size // ROW_BYTES * ROW_BYTES
    words = bytes_n[:whole].view(np.int64).reshape(-1, ROW_BYTES // 8)
    wanted = xxhash.xxh3_128(size.to_bytes(8, "little"))
    for part in (words.sum(0), words.sum(1), bytes_n[whole:]):
        wanted.update(part.tobytes())
    assert has_checksum(data(size), f"sums:{wanted.hexdigest()}")
    assert checksum(data(size)) == f"xxh3:{xxhash.xxh3_128_hexdigest(bytes_n)}"


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(()),
        torch.randn(0, 5),
        torch.randn(5),
        torch.randn(300, 700),
        torch.randn(700, 900)[:, 100:600],
        torch.randn(64, 4096).t(),
        torch.randn(40, 30, 50),
        torch.arange(70000),
        torch.randn(2200, 300),  # several chunks, whose ends are ends of rows of the checksum too
        torch.randn(2048 * 128 + 5),  # the last chunk has no whole row
        torch.tensor([True, False, True]),
    ],
    ids=lambda x: str(tuple(x.shape)),
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_a_copy_has_the_checksum_of_what_was_copied(source, dtype):
    wanted = source.to(dtype or source.dtype).contiguous()
    target = torch.zeros(wanted.numel() * wanted.dtype.itemsize, dtype=torch.uint8)
    assert copy_with_checksum(target, source, wanted.dtype) == checksum(wanted)
    assert torch.equal(target, as_bytes(wanted))


@pytest.mark.parametrize("kind", [XXH3, SUMS])
def test_a_block_may_lie_anywhere_in_its_parameter(kind):
    numbers = torch.arange(5000, dtype=torch.float32)
    for start in (0, 1, 2, 3):
        part = numbers[start : start + 4100]
        assert has_checksum(part, _checksum(as_bytes(part.clone()), kind))


KINDS = pytest.mark.parametrize("kind", [XXH3, SUMS])


@KINDS
@settings(deadline=None, max_examples=60)
@given(st.sampled_from([9, ROW_BYTES + 11, 5 * ROW_BYTES]), st.data())
def test_flips_and_exchanges_are_found(kind, size, choose):
    bytes_n = data(size)
    whole = _checksum(bytes_n, kind)
    at = choose.draw(st.integers(0, size - 1))
    flipped = bytes_n.clone()
    flipped[at] ^= 1 << choose.draw(st.integers(0, 7))
    assert not has_checksum(flipped, whole)
    other = choose.draw(st.integers(0, size - 1))
    exchanged = bytes_n.clone()
    exchanged[[at, other]] = bytes_n[[other, at]]
    assert has_checksum(exchanged, whole) == torch.equal(exchanged, bytes_n)


@KINDS
def test_exchanged_signs_rows_and_words_are_found(kind):
    """What sums of words with weights, or without, would miss."""
    words = data(4 * ROW_BYTES).view(torch.int64).clone()
    words[5], words[5 + 2 * 1024] = 1, 1 - 2**63  # differ in the top bit alone
    whole = _checksum(as_bytes(words), kind)
    for pairs in ([5, 5 + 2 * 1024], [0, 1], [0, 1024]):
        exchanged = words.clone()
        exchanged[pairs] = words[pairs[::-1]]
        assert not has_checksum(exchanged, whole), pairs
    rows = words.view(4, 1024)
    assert not has_checksum(rows[[1, 0, 2, 3]].contiguous(), whole)
    assert not has_checksum(rows[:3].contiguous(), whole)
    assert not has_checksum(
        torch.zeros(ROW_BYTES), _checksum(as_bytes(torch.zeros(2 * ROW_BYTES)), kind)
    )
