"""Read the log of an inspect-ai evaluation as results.

Source: inspect-ai 0.3.285, `inspect_ai.log.EvalLog` as JSON, and `inspect_ai.scorer.value_to_float`
for the values of scores.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ratchet.errors import DataError
from ratchet.evals.results import (
    MAX_PROMPT_CHARS,
    AttemptEnd,
    AttemptResult,
    EvalResults,
    PromptResult,
)
from ratchet.utils.safe_read import read_json

# Scores that are words: correct, partial, incorrect, no answer; and yes-no answers.
WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def read_inspect_log(path: Path, model: str) -> EvalResults:
    """Return the results of a log. An epoch of a sample is an attempt.

    A sample with an error is a failed attempt, without a reward. Attempts are greedy if the
    temperature was 0 and there was one epoch.

    Args:
        path: The log, as JSON.
        model: The name of the model whose tokens are counted; judges have other names.

    Raises:
        DataError: The file is no such log, or a score is not a number.
    """
    try:
        log = read_json(path)
        config = log["plan"]["config"]
        epochs = log["eval"]["config"].get("epochs") or 1
        is_greedy = config.get("temperature") == 0 and epochs == 1
        scorer = _find_scorer(log)
        samples: dict[str, list[Mapping[str, Any]]] = {}
        for sample in log.get("samples") or []:
            samples.setdefault(str(sample["id"]), []).append(sample)
        prompt_results = []
        for name, attempts in samples.items():
            results = [_read_attempt(sample, scorer, model) for sample in attempts]
            prompt_results.append(
                _make_prompt_result(name, log["eval"]["task"], attempts[0], results, is_greedy)
            )
        about = {
            "on": f"inspect:{log['eval']['task'].rpartition('/')[2]}",
            "tasks": len(prompt_results),
            "samples": 0 if is_greedy else epochs,
            "temperature": config.get("temperature"),
            "max_new_tokens": config.get("max_tokens"),
            "scorer": scorer,
            "inspect_ai": log["eval"]["packages"].get("inspect_ai"),
        }
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a log of inspect-ai: {type(error).__name__}: {error}"
        ) from error
    return EvalResults(tuple(prompt_results), about=about)


def _find_scorer(log: Mapping[str, Any]) -> str | None:
    """Return the name of the task's first score; None if it has no scorer."""
    scores = (sample.get("scores") or {} for sample in log.get("samples") or [])
    return next((name for names in scores for name in names), None)


def _make_prompt_result(
    name: str,
    task: str,
    sample: Mapping[str, Any],
    attempts: Sequence[AttemptResult],
    is_greedy: bool,
) -> PromptResult:
    identity = json.dumps([sample["input"], sample.get("target")], sort_keys=True)
    text = sample["input"]
    if not isinstance(text, str):
        text = _get_text(text[-1]) if text else ""
    return PromptResult(
        id=name,
        tag=task,
        digest=blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(),
        votes=False,
        greedy=attempts[0] if is_greedy else None,
        sampled=() if is_greedy else tuple(attempts),
        prompt=text[:MAX_PROMPT_CHARS],
    )


def _get_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _read_attempt(sample: Mapping[str, Any], scorer: str | None, model: str) -> AttemptResult:
    output = sample.get("output") or {}
    choices = output.get("choices") or [{}]
    usage = (sample.get("model_usage") or {}).get(model) or {}
    tokens = int(usage.get("output_tokens") or 0)
    text = _get_text(choices[0].get("message") or {})
    if sample.get("error"):
        message = str(sample["error"].get("message")).strip()
        return AttemptResult("failed", None, tokens=tokens, text=text, detail=f"inspect: {message}")
    score = (sample.get("scores") or {}).get(scorer) or {}
    reward = _convert_score(scorer, score.get("value"))
    is_cut = bool(sample.get("limit")) or choices[0].get("stop_reason") == "max_tokens"
    end: AttemptEnd = "truncated" if is_cut else "unjudged" if reward is None else "scored"
    return AttemptResult(end, reward, answer=score.get("answer"), tokens=tokens, text=text)


def _convert_score(scorer: str | None, value: Any) -> float | None:
    """Return the reward of a score; None for no score.

    Raises DataError for a score that is neither a number nor a word of inspect-ai.
    """
    if isinstance(value, str):
        value = WORDS.get(value, WORDS.get(value.lower(), value))
        with contextlib.suppress(ValueError):
            value = float(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"scorer {scorer} gives {value!r:.80}, and results take numbers: let the task's first "
            "scorer give one"
        )
    return float(value)
