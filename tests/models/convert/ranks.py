"""What ranks of Megatron do in the tests: they take their parts from a Hugging Face directory,
compute, and give them back."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

TOKENS = 12


def sample():
    return torch.randint(50, (TOKENS,), generator=torch.Generator().manual_seed(3))


def _policy(directory, **sizes):
    from ratchet.models.convert.dimensions import Dimensions
    from ratchet.models.convert.megatron import MegatronShard, fill_parameters, megatron_layout
    from ratchet.models.megatron.policy import MegatronPolicy
    from ratchet.models.parallel.megatron_sizes import MegatronSizes
    from ratchet.models.weights.hf_weights import WeightFiles, read_config

    shape = read_config(Path(directory))
    policy = MegatronPolicy(shape, MegatronSizes(**sizes))
    part = policy.shard.model
    layout = megatron_layout(
        Dimensions.from_config(shape), MegatronShard(part.tensor, part.pipeline, part.experts)
    )
    (stage,) = policy.chunks
    fill_parameters(dict(stage.named_parameters()), layout, WeightFiles.find(Path(directory)).block)
    return policy, stage, layout


def logits_alone(rank, directories):
    """By directory: the logits [T, V] of one rank of Megatron that has the whole model."""
    from ratchet.config.model_shape.decoder_config import FAMILIES
    from ratchet.models.megatron.build import init_process_groups
    from ratchet.models.parallel.megatron_sizes import MegatronSizes
    from ratchet.models.weights.hf_weights import read_json

    init_process_groups(MegatronSizes())
    found = {}
    with torch.no_grad():
        for directory in directories:
            hf = read_json(Path(directory) / "config.json")
            found[directory] = (
                _ours(directory) if hf["model_type"] in FAMILIES else _by_core(directory, hf)
            ).numpy()
    return found


def _ours(directory):
    policy, _, _ = _policy(directory)
    return policy.logits(policy.hidden(sample(), torch.arange(TOKENS), [TOKENS]))


def mtp_logits_alone(rank, directories):
    """By directory: the logits [T, V] of each depth of multi-token prediction, by the layers that
    Megatron has for it."""
    from models.convert.cases import MTP

    from ratchet.models.megatron.build import init_process_groups
    from ratchet.models.parallel.megatron_sizes import MegatronSizes
    from ratchet.models.weights.hf_weights import read_json

    init_process_groups(MegatronSizes())
    found = {}
    for model, directory in directories.items():
        stage = _core_model(directory, read_json(Path(directory) / "config.json"), MTP[model])
        outputs = []
        stage.mtp.register_forward_hook(lambda module, inputs, out, to=outputs: to.append(out))
        with torch.no_grad():
            stage(sample()[None], torch.arange(TOKENS)[None], None, labels=sample()[None])
            _, *states = outputs[0].chunk(1 + MTP[model])
            found[model] = [stage.output_layer(state)[0][:, 0].numpy() for state in states]
    return found


def _by_core(directory, hf):
    model = _core_model(directory, hf)
    return model(sample()[None], torch.arange(TOKENS)[None], None)[0]


def _core_model(directory, hf, mtp_layers=0):
    from models.convert.cases import reader
    from models.convert.core_models import core_model

    from ratchet.models.convert.dimensions import Dimensions
    from ratchet.models.convert.megatron import MegatronShard, fill_parameters, megatron_layout

    model = core_model(hf, mtp_layers)
    biases = {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")
    }
    dimensions = replace(Dimensions.from_hf(hf), mtp_layers=mtp_layers)
    fill_parameters(
        {**dict(model.named_parameters()), **biases},
        megatron_layout(dimensions, MegatronShard()),
        reader(Path(directory), dimensions),
    )
    return model


def round_trip(rank, directory, written, saved, sizes):
    """(logits of this rank's rows of the vocabulary or None, whether Megatron reads `written` as
    what was filled, the blocks of this rank); and saves a checkpoint of Megatron's own to
    `saved`."""
    from ratchet.models.convert.megatron import list_blocks
    from ratchet.models.megatron.build import (
        init_process_groups,  # makes Megatron ready to be imported
    )
    from ratchet.models.parallel.megatron_sizes import MegatronSizes

    from megatron.core import dist_checkpointing, parallel_state  # isort: skip
    from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip

    # so that Megatron, when it saves, may start a process
    multiprocessing.current_process()._config["daemon"] = False

    init_process_groups(MegatronSizes(**sizes))
    policy, stage, layout = _policy(directory, **sizes)
    with torch.no_grad():
        logits = _logits(policy, stage, parallel_state)
        own = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
        sharded = stage.sharded_state_dict()
        if rank == 0:
            Path(saved).mkdir()
        dist.barrier()
        dist_checkpointing.save(sharded, saved)
        if filesystem_async._results_queue is not None:  # its process would outlive this one
            filesystem_async._results_queue._manager.shutdown()
        loaded = dist_checkpointing.load(stage.sharded_state_dict(), written)
    same = all(torch.equal(loaded[name], tensor) for name, tensor in own.items())
    given = [
        (block.name, block.shape, block.offsets, block.tensor.numpy())
        for block in list_blocks(own, layout)
    ]
    return logits, same, given


def _logits(policy, stage, parallel_state):
    """Stage by stage; None where the last one is elsewhere."""
    feed = policy.pad_inputs(policy.pack_inputs(sample(), torch.arange(TOKENS), [TOKENS]))
    if not stage.pre_process:
        x = torch.empty(
            TOKENS // (policy.sizes.tensor if policy.sizes.sequence else 1), 1, policy.hidden_size
        )
        dist.recv(x, parallel_state.get_pipeline_model_parallel_prev_rank())
        stage.set_input_tensor(x)
    x = stage(feed)
    if not stage.post_process:
        dist.send(x.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return policy.logits(policy.unpad_hidden(feed, x)).numpy()
