"""What of fp8 by Transformer Engine a CPU can see: which devices and shapes it takes, and what
Megatron is told."""

import pytest
import torch
from learners.ranks import run_ranks

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ConfigError, ModelError
from ratchet.models.parallel.megatron_sizes import Fp8Format

SHAPE = DecoderConfig(23, 64, 2, 4, 2, 16, 128)


def test_a_device_that_does_not_multiply_so_is_refused():
    Fp8Format("hybrid", "tensorwise").check((8, 9))
    Fp8Format("e4m3", "mxfp8").check((10, 0))
    with pytest.raises(
        ConfigError, match=r"compute capability 8\.9, but this one has 8\.0: remove learner\.fp8"
    ):
        Fp8Format("hybrid", "delayed").check((8, 0))
    with pytest.raises(ConfigError, match="choose another fp8_recipe"):
        Fp8Format("e4m3", "mxfp8").check((9, 0))


def test_a_shape_that_it_cannot_multiply_is_refused():
    Fp8Format("hybrid", "delayed").check_shape(SHAPE, 2)
    with pytest.raises(
        ModelError, match=r"QKV projection is 64 on a rank: lower learner\.tensor_parallel"
    ):
        Fp8Format("e4m3", "blockwise").check_shape(DecoderConfig(23, 128, 2, 4, 2, 16, 256), 2)


def told(rank):
    """Of a spec with fp8 and one without: whether its linear maps are the right ones; and what the
    configuration says."""
    from ratchet.models.megatron import layer_modules
    from ratchet.models.megatron.build import transformer_config
    from ratchet.models.parallel.megatron_sizes import MegatronSizes

    config = transformer_config(
        SHAPE, MegatronSizes(), dtype=torch.bfloat16, fp8=Fp8Format("hybrid", "delayed")
    )
    maps = []
    for fp8 in (True, False):
        layer = layer_modules.layer_spec(SHAPE, 0, fp8=fp8).submodules
        attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
        found = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
        te_linear = layer_modules.te_linear
        own = te_linear.TEColumnParallelLinear, te_linear.TERowParallelLinear
        column, row = own if fp8 else (layer_modules.ColumnLinear, layer_modules.RowLinear)
        maps.append(
            all(
                made is wanted
                for made, wanted in zip(found, (column, row, column, row), strict=True)
            )
        )
    return maps, config.fp8, config.fp8_recipe, config.bf16


@pytest.mark.slow
@pytest.mark.needs("megatron")
def test_megatron_is_told_and_its_maps_are_those_of_transformer_engine():
    assert run_ranks(1, "models.test_megatron_fp8:told") == [
        ([True, True], "hybrid", "delayed", True)
    ]
