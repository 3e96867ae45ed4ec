"""The command `ratchet push`. It imports little, like `ratchet.cli.main`."""

from __future__ import annotations

from typing import Annotated

import typer

from ratchet.cli.errors import say


def push(
    run: Annotated[str, typer.Argument(help="A run, or RUN@STEP for a checkpoint of it.")],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="USER/NAME",
            help="The repository; it is created if it is missing. Default: the run's name.",
        ),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Upload the LoRA adapter instead of the merged model."),
    ] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Create the repository as a private one.")
    ] = False,
) -> None:
    """Upload a run's model, tokenizer and a model card to the Hugging Face Hub (or the Hub at
    HF_ENDPOINT). Records and data are not uploaded."""
    from ratchet.commands.push.command import push_run

    push_run(run, to, adapter=adapter, private=private, say=say)
