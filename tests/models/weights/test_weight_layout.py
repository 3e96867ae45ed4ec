import torch

from ratchet.models.weights.weight_layout import WeightPiece, cut_blocks


def test_rows_of_a_weight_that_is_no_matrix_are_blocks_of_as_many_dimensions():
    """Experts of transformers, which are one weight there; those of our decoder are a matrix
    each."""
    whole = torch.arange(4 * 3 * 2).view(4, 3, 2)
    pieces = (WeightPiece("experts", (4, 3, 2), (0, 0, 0), range(4)),)
    (block,) = cut_blocks(pieces, whole[2:3], range(2, 3))
    assert (block.shape, block.offsets) == ((4, 3, 2), (2, 0, 0))
    assert torch.equal(block.tensor, whole[2:3])
