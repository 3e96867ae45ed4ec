"""Every link brings what the ranks have, bit by bit, to a generator with weights of its own."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch
from learners.spread_cases import SHAPE, UNTIED, VOCAB, assembled
from weight_sync.components import Kept, engine
from weight_sync.processes import Processes

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ModelError, WeightSyncError
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.load import init_policy
from ratchet.protocols import WeightSync
from ratchet.weight_sync import handover
from ratchet.weight_sync.collective import CollectiveWeightSync
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver, WeightSender
from ratchet.weight_sync.files import FilesWeightSync
from ratchet.weight_sync.handover import HandoverWeightSync
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync
from ratchet.weight_sync.weight_blocks import WeightBlock, check_coverage

LINKS = {
    "shared_memory": lambda senders, receivers, path, **o: SharedMemoryWeightSync(
        senders, receivers, run="test", **o
    ),
    "collective": lambda senders, receivers, path, **o: CollectiveWeightSync(
        senders, receivers, bucket_mib=1, timeout_s=30, **o
    ),
    "files": lambda senders, receivers, path, **o: FilesWeightSync(
        senders, receivers, directory=path, **o
    ),
    "delta by files": lambda senders, receivers, path, **o: FilesWeightSync(
        senders, receivers, directory=path, changes_only=True, **o
    ),
    "delta by shared memory": lambda senders, receivers, path, **o: SharedMemoryWeightSync(
        senders, receivers, changes_only=True, **o
    ),
    "delta by collective": lambda senders, receivers, path, **o: CollectiveWeightSync(
        senders, receivers, bucket_mib=1, timeout_s=30, changes_only=True, **o
    ),
}
TOPOLOGIES = {
    "fsdp2": {"shards": 2},
    "tp2": {"tensor": 2},
    "fsdp2 x tp2": {"shards": 2, "tensor": 2},
}


@pytest.fixture(scope="module", params=TOPOLOGIES)
def learner(request):
    topology = TOPOLOGIES[request.param]
    made = Processes(
        math.prod(topology.values()),
        "weight_sync.components:SpreadRank",
        topology,
        UNTIED,
        gloo=True,
    )
    yield made
    made.close()


def together(blocks_by_rank):
    return assembled([(None, blocks, None, None) for blocks in blocks_by_rank])


def held(generator):
    return {shard.name: shard.tensor.clone() for shard in generator.weights()}


def assert_bit_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.mark.parametrize("kind", LINKS)
def test_pushes_are_bit_exact(kind, learner, tmp_path):
    generator = engine(UNTIED)
    link = LINKS[kind](learner, LocalRank(WeightReceiver(generator)), tmp_path / "weight_sync")
    assert isinstance(link, WeightSync)

    async def pushes():
        assert await link.audit(), "they start from other weights"
        for version in (1, 2, 3):
            await link.push(version)
            assert await link.audit() == []
            assert generator.version == version
            assert_bit_equal(held(generator), together(await learner.call("blocks")))
            await learner.call("change", 1.5)
            assert await link.audit(), "the learner has moved on"
        await link.close()

    asyncio.run(pushes())
    assert not list((tmp_path / "weight_sync").glob("*"))


def local(shape, dtype=torch.float32, seed=5):
    policy = init_policy(shape, seed=seed, dtype=dtype)
    return policy, LocalRank(WeightSender(LocalLearner(LocalConfig(), policy)))


@pytest.mark.parametrize("kind", LINKS)
def test_a_learner_of_this_process_has_one_rank_and_sends_bfloat16_where_asked(kind, tmp_path):
    policy, outlet = local(SHAPE)
    generator = engine(dtype=torch.bfloat16)
    link = LINKS[kind](outlet, LocalRank(WeightReceiver(generator)), tmp_path, dtype="bfloat16")
    asyncio.run(link.push(1))
    assert_bit_equal(
        held(generator), {name: tensor.bfloat16() for name, tensor in policy.canonical_weights()}
    )
    assert asyncio.run(link.audit()) == []
    half = sum(parameter.numel() for parameter in policy.parameters()) * 2
    assert link.sent_bytes == half
    with torch.no_grad():
        policy.decoder.layers["0"].mlp.down_proj.weight[0, 0] += 1
    asyncio.run(link.push(2))
    assert link.sent_bytes == (6 if link.transport.changes_only else half)  # a position and a value
    assert_bit_equal(
        held(generator), {name: tensor.bfloat16() for name, tensor in policy.canonical_weights()}
    )
    asyncio.run(link.close())


def test_a_handover_passes_the_learners_own_tensors_and_keeps_none(monkeypatch):
    policy, sender = local(SHAPE)
    kept = Kept()
    received = []

    async def receive(shards):
        kept.staged = list(shards)
        received.extend(shard.tensor.data_ptr() for shard in kept.staged)

    monkeypatch.setattr(kept, "receive", receive)
    link = HandoverWeightSync(sender, LocalRank(WeightReceiver(kept)))
    weights = dict(policy.canonical_weights())
    asyncio.run(link.push(1))
    assert_bit_equal(kept.held, weights)
    assert received == [tensor.data_ptr() for tensor in weights.values()]
    assert not handover._HANDED_OVER
    kept.refuses = ModelError("it has no such weight")
    with pytest.raises(WeightSyncError, match="no such weight"):
        asyncio.run(link.push(2))
    assert kept.version == 1
    assert not handover._HANDED_OVER


def test_a_handover_refuses_weights_that_change_on_the_way():
    policy, sender = local(SHAPE)
    kept = Kept()
    link = HandoverWeightSync(sender, LocalRank(WeightReceiver(kept)))
    send = link._send

    async def send_and_train(*arguments):
        parts = await send(*arguments)
        with torch.no_grad():
            policy.decoder.layers["0"].mlp.down_proj.weight[0, 0] += 1
        return parts

    link._send = send_and_train
    with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.down_proj\.weight' differs"):
        asyncio.run(link.push(1))
    assert kept.version == 0


def test_experts_travel_by_their_own_names():
    shape = DecoderConfig(
        VOCAB,
        16,
        2,
        4,
        2,
        8,
        24,
        family="qwen3_moe",
        n_experts=4,
        experts_per_token=2,
        expert_intermediate_size=12,
    )
    policy, outlet = local(shape)
    generator = engine(shape)
    link = SharedMemoryWeightSync(outlet, LocalRank(WeightReceiver(generator)))
    asyncio.run(link.push(1))
    assert any(".experts.3.down_proj" in name for name in held(generator))
    assert_bit_equal(held(generator), dict(policy.canonical_weights()))


def test_a_tied_learner_fills_the_head_of_an_untied_generator():
    policy, outlet = local(SHAPE)
    generator = engine(replace(SHAPE, tied=False))
    asyncio.run(SharedMemoryWeightSync(outlet, LocalRank(WeightReceiver(generator))).push(1))
    found, embedding = held(generator), policy.decoder.embed_tokens.weight
    assert torch.equal(found["lm_head.weight"], embedding)
    assert torch.equal(found["model.embed_tokens.weight"], embedding)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (replace(SHAPE, n_layers=5), "layers.4"),
        (replace(SHAPE, n_layers=3), "none of that name"),
        (UNTIED, "weight '"),
    ],
)
def test_a_generator_of_another_model_refuses_before_anything_moves(shape, said):
    _, outlet = local(SHAPE)
    generator = engine(shape)
    before = held(generator)
    link = SharedMemoryWeightSync(outlet, LocalRank(WeightReceiver(generator)))
    with pytest.raises(WeightSyncError, match=said):
        asyncio.run(link.push(1))
    assert_bit_equal(held(generator), before)
    assert generator.version == 0


def test_files_of_a_user_in_the_directory_stay(tmp_path):
    names = ("push-notes/mine", "push-1-abcdef01/mine", ".draft-mine/mine", "rank-0.safetensors")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    links = []
    for _ in range(2):  # the second run shares the directory of the first
        link = LINKS["files"](local(SHAPE)[1], LocalRank(WeightReceiver(engine())), tmp_path)
        asyncio.run(link.push(1))
        links.append(link)
    assert len(list(tmp_path.glob("*/push-1-*/rank-0.safetensors"))) == 2
    for link in links:
        asyncio.run(link.close())
    left = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted(tmp_path / name for name in names)


@pytest.mark.medium
def test_several_receivers_get_the_same(tmp_path):
    ranks = Processes(2, "weight_sync.components:RowsRank")
    receivers = Processes(2, "weight_sync.components:KeptIntake")
    try:
        for make in (
            LINKS["shared_memory"],
            lambda *a: CollectiveWeightSync(*a[:2], receivers_count=2, timeout_s=30),
        ):
            link = make(ranks, receivers, tmp_path)
            asyncio.run(link.push(7))
            (version, first), (_, second) = receivers.ask("held")
            assert version == 7
            assert_bit_equal(first, second)
            assert first["w0"].shape == (6, 5)
    finally:
        ranks.close()
        receivers.close()


def block(offsets, sizes, name="w", shape=(4, 4), dtype="float32"):
    return WeightBlock(name, shape, offsets, sizes, dtype)


@pytest.mark.parametrize(
    ("by_rank", "said"),
    [
        (
            [[block((0, 0), (2, 4))], [block((2, 0), (1, 4))]],
            "no rank sends 4 of the elements of weight 'w'",
        ),
        (
            [[block((0, 0), (3, 4))], [block((2, 0), (1, 4))]],
            "ranks 0 and 1 send the same elements of weight 'w'",
        ),
        (
            [[block((0, 0), (2, 4))], [block((2, 0), (2, 4), dtype="bfloat16")]],
            "the ranks run different models",
        ),
    ],
)
def test_ranks_that_do_not_add_up_to_a_model_are_found(by_rank, said):
    with pytest.raises(WeightSyncError, match=said):
        check_coverage(by_rank)


def test_boxes_of_two_divisions_add_up():
    check_coverage([[block((row, column), (2, 2)) for column in (0, 2)] for row in (0, 2)])
