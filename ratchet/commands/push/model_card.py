"""Write the model card of a run: README.md with the Hub's metadata and the run's figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ratchet.config.yaml_tree import write_text
from ratchet.errors import DataError
from ratchet.evals.markdown import format_table
from ratchet.evals.results import RESULTS, EvalResults, Measure
from ratchet.observe.provenance import read_provenance
from ratchet.observe.sinks import read_jsonl
from ratchet.runs.run_dir import RunDirectory

MAX_CURVE_ROWS = 12
# Metric -> heading in the table of curves
CURVES = {
    "eval/accuracy": "held-out accuracy",
    "eval/loss": "held-out loss",
    "rollout/reward": "reward of rollouts",
    "policy/loss": "training loss",
}
USAGE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```"""
ADAPTER_USAGE = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{name}")
```"""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class PushedModel:
    """The facts that a model card states."""

    name: str
    """The repository, USER/NAME."""
    run: Path
    """The directory of the run."""
    step: int | None
    """The step of the checkpoint; None for the finished model."""
    base_model: str | None = None
    """The Hub id of the model that the run started from; None if it has none."""
    datasets: tuple[str, ...] = ()
    """The Hub ids of its datasets."""
    is_adapter: bool = False
    """True if only the LoRA adapter is uploaded."""
    is_language_model: bool = True
    """False for a model with a scalar head, such as a reward model."""


def make_model_card(model: PushedModel) -> str:
    """Return the text of README.md: metadata, figures, recipe and versions.

    Directories are removed from paths in the recipe. Raises RunDirectoryError if the run's recipe
    is damaged.
    """
    run = RunDirectory(model.run)
    recipe = run.read_config()
    recipe["stages"] = list(_select_stages(recipe["stages"], model.step))
    rows = [row for row in read_jsonl(run.metrics) if (model.step or row["step"]) >= row["step"]]
    evaluations = [] if model.step else list(_read_evaluations(run))
    provenance = read_provenance(run.provenance)
    sections = [
        f"---\n{_make_metadata(model, recipe, rows, evaluations).to_yaml()}\n---",
        f"# {model.name.rpartition('/')[2]}",
        _introduce(model, rows),
        _show_usage(model),
        "## Training\n\n" + _make_stage_table(recipe["stages"]),
        _make_curve_table(rows),
        _make_evaluation_table(evaluations),
        _list_data(provenance),
        _show_recipe(recipe),
        _list_versions(provenance),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _select_stages(stages: Sequence[Row], step: int | None) -> Iterator[Row]:
    """Yield the stages that a run had begun by a step; None: all."""
    n_earlier_steps = 0
    for stage in stages:
        if step is None or n_earlier_steps < step:
            yield stage
        n_earlier_steps += stage["steps"]


def _make_metadata(
    model: PushedModel,
    recipe: Row,
    rows: Sequence[Row],
    evaluations: Sequence[tuple[str, list[Measure]]],
) -> ModelCardData:
    algorithms = [str(stage["algorithm"]["kind"]) for stage in recipe["stages"]]
    results = [
        _make_result(tasks, measure.name, measure.value)
        for tasks, measures in evaluations
        for measure in measures
        if measure.prompts
    ]
    last = next((row for row in reversed(rows) if row.get("eval/accuracy") is not None), None)
    if last is not None:
        tasks = str(recipe["stages"][-1]["environment"]["kind"])
        name = "accuracy" if _is_share(rows) else "reward"
        results.insert(0, _make_result(tasks, name, last["eval/accuracy"]))
    return ModelCardData(
        model_name=model.name.rpartition("/")[2],
        base_model=model.base_model,
        datasets=list(model.datasets) or None,
        library_name="peft" if model.is_adapter else "transformers",
        tags=["ratchet", *dict.fromkeys(algorithms)],
        eval_results=results or None,
    )


def _make_result(tasks: str, metric: str, value: float) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=tasks,
        dataset_name=tasks,
        metric_type=metric,
        metric_value=round(value, 6),
    )


def _read_evaluations(run: RunDirectory) -> Iterator[tuple[str, list[Measure]]]:
    """Yield the tasks and measures of each `ratchet eval` of the run; damaged files are omitted."""
    for path in sorted(run.evals.glob(f"*/{RESULTS}")):
        try:
            results = EvalResults.read(path)
        except DataError:
            continue
        yield str(results.about.get("on")), results.compute_measures(every_k=False)


def _is_share(rows: Sequence[Row]) -> bool:
    """True if all held-out rewards are between 0 and 1, so that their mean is an accuracy."""
    lows = [row["eval/min_reward"] for row in rows if row.get("eval/min_reward") is not None]
    highs = [row["eval/max_reward"] for row in rows if row.get("eval/max_reward") is not None]
    return min(lows, default=0) >= 0 and max(highs, default=1) <= 1


def _introduce(model: PushedModel, rows: Sequence[Row]) -> str:
    kind = "A LoRA adapter" if model.is_adapter else "A model"
    base = f", from [{model.base_model}](/{model.base_model})" if model.base_model else ""
    step = f", after step {model.step or rows[-1]['step']}" if rows else ""
    return f"{kind} trained with Ratchet{base}{step}."


def _show_usage(model: PushedModel) -> str:
    if not model.is_language_model:
        return ""
    usage = ADAPTER_USAGE if model.is_adapter else USAGE
    return usage.format(name=model.name, base=model.base_model)


def _make_stage_table(stages: Sequence[Row]) -> str:
    rows = [
        (
            stage["name"],
            stage["algorithm"]["kind"],
            stage["environment"]["kind"],
            stage["steps"],
            stage["batch_size"],
            stage["optimizer"]["lr"],
        )
        for stage in stages
    ]
    return format_table(("stage", "algorithm", "tasks", "steps", "batch", "learning rate"), rows)


def _make_curve_table(rows: Sequence[Row]) -> str:
    """Return the course of the metrics at up to MAX_CURVE_ROWS steps, the first and last included.

    Steps with an evaluation are chosen, if there are any.
    """
    metrics = [name for name in CURVES if any(row.get(name) is not None for row in rows)]
    evaluated = [row for row in rows if "eval/accuracy" in row or "eval/loss" in row]
    chosen = evaluated or [row for row in rows if any(name in row for name in metrics)]
    if not chosen:
        return ""
    count = min(len(chosen), MAX_CURVE_ROWS)
    indices = [round(i * (len(chosen) - 1) / max(count - 1, 1)) for i in range(count)]
    lines = [
        (chosen[i]["step"], *(_format_number(chosen[i].get(name)) for name in metrics))
        for i in indices
    ]
    headings = ("step", *(CURVES[name] for name in metrics))
    return "## Curves\n\n" + format_table(headings, lines)


def _make_evaluation_table(evaluations: Sequence[tuple[str, list[Measure]]]) -> str:
    lines = [
        (
            tasks,
            measure.name,
            _format_number(measure.value),
            f"{measure.low:.4g} to {measure.high:.4g}",
            measure.prompts,
        )
        for tasks, measures in evaluations
        for measure in measures
        if measure.prompts
    ]
    if not lines:
        return ""
    headings = ("tasks", "measure", "value", "95 % interval", "prompts")
    return "## Evaluations\n\n" + format_table(headings, lines)


def _list_data(provenance: Sequence[Row]) -> str:
    """List the names and fingerprints of data files; their contents and directories stay here."""
    files = {
        Path(path).name: fingerprint
        for entry in provenance
        for path, fingerprint in entry.get("data", {}).items()
    }
    if not files:
        return ""
    return "## Data files\n\n" + format_table(("file", "fingerprint"), list(files.items()))


def _show_recipe(recipe: Row) -> str:
    text = write_text(_remove_directories(recipe))
    fence = "~" * 12
    return f"<details><summary>Recipe</summary>\n\n{fence}yaml\n{text}{fence}\n\n</details>"


def _remove_directories(value: Any) -> Any:
    """Return the value with absolute paths cut to their last part, and no passwords in URLs."""
    if isinstance(value, Mapping):
        return {key: _remove_directories(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_remove_directories(item) for item in value]
    if not isinstance(value, str) or "\n" in value:
        return value
    if value.startswith(("/", "~/", "file:/")):
        return Path(value).name
    return re.sub(r"://[^/@\s]*@", "://", value)


def _list_versions(provenance: Sequence[Row]) -> str:
    code = next((entry["code"] for entry in reversed(provenance) if "code" in entry), {})
    versions = [(name, code[name]) for name in code if name != "sources" and code[name]]
    return "## Versions\n\n" + format_table(("package", "version"), versions) if versions else ""


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
