"""Configuration of the generators. Free of torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ratchet.config.base import Section


class EngineConfig(Section):
    """Our own engine: it runs in this process, on the very weights that the learner trains."""

    builds: ClassVar[str] = "ratchet.generators.engine.engine:Engine"

    kind: Literal["engine"] = "engine"
    max_running: int = Field(1024, ge=1, description="Requests that are generated at the same time; the others wait.")
    max_context: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Tokens of prompt and completion together; null: as many as the model has positions."
    )
    kv_cache_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto", description="Bound on the KV cache, in GiB; auto: half of the free device memory, or a quarter of the main one."
    )
    prefill_tokens: int = Field(2048, ge=1, description="Prompt tokens of one forward; a longer prompt goes alone.")
    row_multiple: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Token rows of a forward, and of each expert, are padded to a multiple of this, so that a request's result "
        "doesn't depend on its neighbours; auto: measured when the engine starts.",
    )
    keep_kv: bool = Field(
        False, description="Running requests keep the old weights' keys and values at a commit, instead of computing them anew."
    )


class HFConfig(Section):
    """Any causal language model of transformers, in this process: slower than the engine, for models that it can't run."""

    builds: ClassVar[str] = "ratchet.generators.hf:HFGenerator"

    kind: Literal["hf"] = "hf"
    max_running: int = Field(64, ge=1, description="Requests of one padded batch; the next batch starts when it has ended.")
    max_context: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Tokens of prompt and completion together; null: as many as the model has positions."
    )
    keep_kv: bool = Field(
        False, description="Running requests keep the old weights' keys and values at a commit, instead of computing them anew."
    )
