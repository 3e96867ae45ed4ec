import torch
import torch.nn.functional as F

from ratchet.generators.engine.batch_invariance import CANDIDATES, measure_stable_rows


def test_the_probed_multiple_makes_products_of_any_size_agree(decoder):
    """Where a candidate works on this machine; where none does, the largest is taken and rounding
    differs."""
    multiple = measure_stable_rows(decoder)
    assert multiple in CANDIDATES
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    weight = decoder.head_weight.detach()
    same = [
        torch.equal(F.linear(x[:n], weight), F.linear(x, weight)[:n])
        for n in range(multiple, 256, multiple)
    ]
    assert all(same) or multiple == CANDIDATES[-1]


def test_probing_is_deterministic(decoder):
    assert measure_stable_rows(decoder) == measure_stable_rows(decoder)
