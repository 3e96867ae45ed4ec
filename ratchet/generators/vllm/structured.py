"""Make vLLM follow grammars, with its backend `guidance` (llguidance)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ConfigError
from ratchet.generators.engine.stop_strings import TextDecoder
from ratchet.structured_output import StructuredOutput
from ratchet.types import Sampling

BACKENDS = ("guidance", "lm_format_enforcer", "outlines", "xgrammar")


def make_structured_arguments(
    tokenizer: TextDecoder | None, vocab_size: int, directory: Path
) -> tuple[dict[str, Any], str]:
    """Return the keywords of vLLM's `EngineArgs` for grammars, and "".

    The tokenizer is saved to the directory for vLLM. If vLLM can't follow grammars, return {} and
    the reason: its engine would end at a request with a grammar.
    """
    if not isinstance(tokenizer, Tokenizer) or not tokenizer.eos_ids:
        return {}, "the generator has no tokenizer with an EOS token"
    try:
        # vLLM imports all its backends, whichever it uses.
        for backend in BACKENDS:
            import_module(f"vllm.v1.structured_output.backend_{backend}")
        import_module("llguidance").LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=tokenizer.eos_ids[0]
        )
    except ImportError as error:
        return {}, f"vLLM's structured output misses a package ({error})"
    except ValueError as error:
        return {}, f"llguidance can't read this tokenizer ({error})"
    tokenizer.save(directory)
    arguments = {
        "skip_tokenizer_init": False,
        "structured_outputs_config": {"backend": "guidance"},
    }
    return arguments, ""


def check_structured(structured: StructuredOutput, sampling: Sampling, eos_id: int) -> None:
    """Raise ConfigError if vLLM can't follow the grammar of a request.

    eos_id: the tokenizer's EOS.
    """
    if eos_id not in sampling.stop_ids:
        raise ConfigError(
            "sampling.structured: vLLM ends a complete answer with the tokenizer's EOS, which is "
            f"not among sampling.stop_ids. Add {eos_id} to sampling.stop_ids."
        )
    if sampling.drawn:
        raise ConfigError(
            "sampling.structured: vLLM can't continue an interrupted completion under a grammar. "
            "Set generator.kind=engine."
        )
    structured.compile()


def make_structured_params(structured: StructuredOutput | None) -> Any:
    """Return vLLM's `StructuredOutputsParams` of a grammar, or None without one."""
    if structured is None:
        return None
    params = import_module("vllm.sampling_params").StructuredOutputsParams
    value = structured.text if structured.kind == "json" else structured.value
    return params(**{structured.kind: value})
