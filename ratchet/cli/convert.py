"""The command `ratchet convert`. It imports little, like `ratchet.cli.main`."""

from __future__ import annotations

from typing import Annotated

import typer

from ratchet.cli.errors import say


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A model directory in any format, a run directory, or a Hub id."
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="A new directory, which appears once it is complete; or an address "
            "(s3://bucket/model).",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            help="hf (safetensors), megatron (dist_checkpointing) or dcp "
            "(torch.distributed.checkpoint)"
        ),
    ] = "hf",
    config: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face directory with config.json and tokenizer, if SRC has none."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Compare every weight by checksum, and the logits of a sample.")
    ] = True,
    merge_lora: Annotated[
        str | None,
        typer.Option(
            metavar="ADAPTER",
            help="Merge this adapter (a directory in peft's format) into the weights of SRC.",
        ),
    ] = None,
) -> None:
    """Convert a model between Hugging Face, Megatron and torch's distributed checkpoints, and merge
    an adapter into it on request. An interrupted conversion continues with the same command."""
    from ratchet.commands.convert.run import convert_paths_or_addresses

    convert_paths_or_addresses(
        source, target, to=to, config=config, verify=verify, say=say, adapter=merge_lora
    )
