"""Matrices that rest in 4 or 8 bits: how far off they are, that quantising again changes nothing,
and products of them."""

import pytest
import torch

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.models.decoder import Decoder
from ratchet.models.layers.quantized import FLOAT8_BLOCK, NF4_BLOCK, QuantizedMatrix
from ratchet.models.weights.hf_weights import canonical_weights

FORMS = ["float8", pytest.param("nf4", marks=pytest.mark.needs("bitsandbytes"))]
BITS = {"float8": 8, "nf4": 4}


def matrix(rows, columns, seed=0):
    """Rows of very different sizes, one of them 0."""
    made = (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        * torch.logspace(-6, 2, rows)[:, None]
    )
    made[rows // 2] = 0
    return made


def largest(plain, block):
    """Of each number's block."""
    flat = torch.nn.functional.pad(plain, (0, -plain.shape[-1] % block)).unflatten(-1, (-1, block))
    return flat.abs().amax(-1, keepdim=True).expand_as(flat).flatten(-2)[..., : plain.shape[-1]]


@pytest.mark.parametrize("shape", [(24, 256), (7, 300), (5, 8)], ids=str)
def test_float8_is_within_the_bound_of_its_format(shape):
    """e4m3 keeps 3 bits behind the leading one, and halves of 2^-9 below 2^-6; a scale leaves its
    largest above 224."""
    plain = matrix(*shape)
    off = (QuantizedMatrix(plain, "float8").plain() - plain).abs()
    assert (off <= torch.maximum(plain.abs() / 16, largest(plain, FLOAT8_BLOCK) * 2**-17)).all()
    assert off.any()


@pytest.mark.needs("bitsandbytes")
def test_nf4_is_within_half_of_its_widest_gap():
    plain = matrix(24, 256)
    off = (QuantizedMatrix(plain, "nf4").plain() - plain).abs()
    assert (off <= 0.16 * largest(plain, NF4_BLOCK)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_what_was_restored_is_quantised_to_the_same_numbers(form, dtype):
    once = QuantizedMatrix(matrix(12, 200).to(dtype), form).plain()
    assert once.dtype == dtype
    assert torch.equal(QuantizedMatrix(once, form).plain(), once)


@pytest.mark.parametrize("form", FORMS)
def test_it_takes_its_bits_and_a_scale_for_each_block(form):
    quantised = QuantizedMatrix(matrix(64, 512), form)
    numbers, blocks = 64 * 512, {"float8": FLOAT8_BLOCK, "nf4": NF4_BLOCK}
    assert (
        quantised.codes.nbytes + quantised.scales.nbytes
        == numbers * BITS[form] // 8 + 4 * numbers // blocks[form]
    )


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_and_its_gradient_are_those_of_the_restored_matrix(form, autocast):
    generator = torch.Generator().manual_seed(2)
    quantised, bias = (
        QuantizedMatrix(matrix(12, 40) / 100, form),
        torch.randn(12, generator=generator),
    )
    x = torch.randn(5, 40, generator=generator, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    kept = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            ours = quantised(x, bias)
        theirs = torch.nn.functional.linear(y, quantised.plain(), bias)
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    for found, wanted in ((ours, theirs), (x.grad, y.grad)):
        assert (found - wanted).norm() <= (0.02 if autocast else 1e-6) * wanted.norm()
    assert not any(tensor.shape == (12, 40) for tensor in kept), (
        "the restored matrix waits for the backward"
    )


@pytest.mark.parametrize("form", FORMS)
def test_new_numbers_count_once_it_is_shut(form):
    quantised, other = QuantizedMatrix(matrix(8, 128), form), matrix(8, 128, seed=1)
    before = quantised.plain()
    quantised.begin_write()
    quantised.contents.copy_(other)
    assert torch.equal(quantised.plain(), before)
    quantised.end_write()
    assert torch.equal(quantised.plain(), QuantizedMatrix(other, form).plain())
    assert quantised.write_buffer is None


def test_a_decoder_with_quantised_maps_has_the_same_names_and_gets_its_weights_back():
    decoder = Decoder(
        DecoderConfig(23, 16, 2, 2, 1, 8, 24, tied=False, qkv_bias=True)
    ).init_weights(0)
    before = {name: tensor.clone() for name, tensor in canonical_weights(decoder)}
    for _, linear in decoder.layer_linears:
        linear.quantise("float8")
    found = dict(canonical_weights(decoder))
    assert list(found) == list(before)
    for name, tensor in found.items():
        assert (tensor - before[name]).abs().max() <= before[name].abs().max() / 16, name
        assert torch.equal(tensor, before[name]) == ("proj.weight" not in name), name
    for _, linear in decoder.layer_linears:
        linear.restore()
    assert [name for name, _ in decoder.named_parameters()].count(
        "layers.0.self_attn.o_proj.weight"
    ) == 1
    assert all(torch.equal(tensor, found[name]) for name, tensor in canonical_weights(decoder))
