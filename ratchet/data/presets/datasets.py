"""Presets of published datasets: their location, the meaning of their columns, and their reward.

A comment before each preset lists the columns of the published dataset. After "Columns checked
against" it names the card, file or code that shows them. A recipe may use a preset for its own
files of the same form:
`environment: {kind: dataset, preset: gsm8k, train: train.jsonl}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.data.formats import benchmark_rows
from ratchet.data.formats.benchmark_rows import RowConverter

BOXED_REQUEST = "\nReason step by step, and put the final answer into \\boxed{}."
# Kinds of training data, see `Preset.data_kinds`.
ROWS_AND_ROLLOUTS = frozenset({"rows", "rollouts"})
ROWS_AND_PAIRS = frozenset({"rows", "pairs"})
# The usual reward for short answers (arXiv:1606.05250).
F1_REWARD = {"kind": "similarity", "measure": "bag", "ignore_case": True}


@dataclass(frozen=True, slots=True)
class Preset:
    """A published dataset: its location, columns and reward."""

    hub: str
    """Id of the dataset on the Hugging Face Hub."""
    columns: Mapping[str, str]
    """Maps each usual name (docs/data.md) to the dataset's column name. Dots reach nested
    values."""
    subset: str | None = None
    """Configuration of the dataset on the Hub."""
    train: str = "train"
    """Name of the training split; "" if there is none."""
    test: str = ""
    """Name of the test split; "" if there is none."""
    prompt: str = ""
    """Template of the prompt over the columns; "" if a column is the prompt."""
    answer_after: str = ""
    """Marker before the answer in the answer's column."""
    keep: tuple[Mapping[str, Any], ...] = ()
    """Filters of the rows, as in a recipe."""
    distinct: bool = False
    """True to keep one row for each prompt, because the dataset repeats prompts."""
    trees: bool = False
    """True if the rows are messages of conversation trees."""
    convert_row: RowConverter | None = None
    """Function that converts a row before the other fields apply."""
    tag: str = ""
    """Column that names a row's domain."""
    data_kinds: frozenset[str] = ROWS_AND_ROLLOUTS
    """Kinds of training data that the dataset offers."""
    reward: str | Mapping[str, Any] = ""
    """Kind or section of the reward; "" if no reward can judge the answers."""
    description: str = field(default="", compare=False)
    """A short description."""


PRESETS: Mapping[str, Preset] = {
    # Columns: question, answer ("...#### 72"); configurations main and socratic. Columns checked
    # against: the published files.
    "gsm8k": Preset(
        "openai/gsm8k",
        {"prompt": "question", "answer": "answer", "solution": "answer"},
        subset="main",
        test="test",
        prompt='{question}\nEnd with "#### " and the answer as a number.',
        answer_after="####",
        reward="numeric_answer",
        description="grade school maths, arXiv:2110.14168",
    ),
    # problem, generated_solution, expected_answer, problem_source; splits train (14M rows),
    # train_5M, train_2M, train_1M. Columns checked against: NeMo RL's openmathinstruct2 loader
    # (split train_1M), other code that reads it.
    "openmathinstruct2": Preset(
        "nvidia/OpenMathInstruct-2",
        {"prompt": "problem", "answer": "expected_answer", "solution": "generated_solution"},
        train="train_1M",
        prompt="{problem}" + BOXED_REQUEST,
        reward="math",
        description="synthetic solutions, arXiv:2410.01560",
    ),
    # problem, answer, solution. Columns checked against: code that reads it, such as NeMo RL's
    # deepscaler loader.
    "deepscaler": Preset(
        "agentica-org/DeepScaleR-Preview-Dataset",
        {"prompt": "problem", "answer": "answer"},
        prompt="{problem}" + BOXED_REQUEST,
        distinct=True,
        reward="math",
        description="competition problems with answers",
    ),
    # data_source, prompt [{role, content}], ability, reward_model {ground_truth, style}, extra_info
    # {index}; each of the 17k prompts occurs about a hundred times. Columns checked against:
    # AISBench's page of the set, code that reads it.
    "dapo_math_17k": Preset(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        {"prompt": "prompt", "answer": "reward_model.ground_truth"},
        distinct=True,
        reward="math",
        description="competition problems with whole numbers as answers, arXiv:2503.14476",
    ),
    # source, problem, solution (with the answer in \boxed{}, except in proofs), messages; splits
    # train, test. Columns checked against: code that reads it.
    "numinamath_cot": Preset(
        "AI-MO/NuminaMath-CoT",
        {"prompt": "problem", "answer": "solution", "solution": "solution"},
        test="test",
        prompt="{problem}" + BOXED_REQUEST,
        keep=({"column": "solution", "contains": "\\boxed{"},),
        distinct=True,
        reward="math",
        description="competition problems with solutions",
    ),
    # problem, solution, answer ("proof" and "notfound" where there is none), problem_type,
    # question_type, problem_is_valid, solution_is_valid, source, synthetic; split train. Columns
    # checked against: the cards of sets made from it (nlile/NuminaMath-1.5-RL-Verifiable), NeMo
    # RL's numinamath loader, which keeps the same rows.
    "numinamath_1_5": Preset(
        "AI-MO/NuminaMath-1.5",
        {"prompt": "problem", "answer": "answer", "solution": "solution"},
        prompt="{problem}" + BOXED_REQUEST,
        keep=(
            {"column": "answer", "min_chars": 1, "none_of": ("proof", "notfound")},
            {"column": "question_type", "none_of": ("proof",)},
            {"column": "problem_is_valid", "one_of": ("Yes",)},
            {"column": "solution_is_valid", "one_of": ("Yes",)},
        ),
        distinct=True,
        reward="math",
        description="competition problems with answers that can be checked",
    ),
    # problem, solution, answer, problem_type, question_type, source, uuid, generations,
    # correctness_math_verify, ..., messages (the problem and a verified generation); configurations
    # default, extended, all. Columns checked against: code that reads it.
    "openr1_math": Preset(
        "open-r1/OpenR1-Math-220k",
        {"messages": "messages", "answer": "answer", "id": "uuid"},
        subset="default",
        reward="math",
        description="reasoning by DeepSeek-R1 on NuminaMath's problems",
    ),
    # id, problem, solution, answer, url, year; 30 rows, split train. Columns checked against:
    # several evaluators that read it.
    "aime_2024": Preset(
        "HuggingFaceH4/aime_2024",
        {"prompt": "problem", "answer": "answer"},
        train="",
        test="train",
        prompt="{problem}" + BOXED_REQUEST,
        reward="math",
        description="AIME I and II of 2024",
    ),
    # problem, answer, id; 30 rows, split test. Columns checked against: several evaluators that
    # read it.
    "aime_2025": Preset(
        "math-ai/aime25",
        {"prompt": "problem", "answer": "answer"},
        train="",
        test="test",
        prompt="{problem}" + BOXED_REQUEST,
        reward="math",
        description="AIME I and II of 2025",
    ),
    # problem_idx, problem, answer (a whole number); 30 rows, split train. Columns checked against:
    # NeMo RL's aime loader.
    "aime_2026": Preset(
        "MathArena/aime_2026",
        {"prompt": "problem", "answer": "answer"},
        train="",
        test="train",
        prompt="{problem}" + BOXED_REQUEST,
        reward="math",
        description="AIME I and II of 2026",
    ),
    # id, problem, solution, answer, url; 90 rows of 2022 to 2024, split train. Columns checked
    # against: dspy's example.
    "aime_2022_2024": Preset(
        "AI-MO/aimo-validation-aime",
        {"prompt": "problem", "answer": "answer", "solution": "solution"},
        prompt="{problem}" + BOXED_REQUEST,
        reward="math",
        description="AIME I and II of 2022 to 2024",
    ),
    # id, title, context, question, answers {text [...], answer_start [...]}; splits train,
    # validation. Columns checked against: its card.
    "squad": Preset(
        "rajpurkar/squad",
        {"prompt": "question", "answer": "answers.text.0", "id": "id"},
        test="validation",
        prompt="{context}\n\n{question}\nAnswer with a few words of the text.",
        reward=F1_REWARD,
        description="questions about a text, arXiv:1606.05250",
    ),
    # message_id, parent_id, text, role (prompter, assistant), lang, rank, deleted, message_tree_id,
    # ...; splits train, validation. Columns checked against: its card, and the project's notebook
    # that reads it.
    "oasst1": Preset(
        "OpenAssistant/oasst1",
        {"messages": "messages", "id": "message_id"},
        test="validation",
        trees=True,
        data_kinds=frozenset({"rows"}),
        description="conversations by volunteers, arXiv:2304.07327",
    ),
    # id, messages [{content, role}], source. Columns checked against: its card.
    "tulu3_sft": Preset(
        "allenai/tulu-3-sft-mixture",
        {"messages": "messages", "id": "id"},
        data_kinds=frozenset({"rows"}),
        description="instructions of many kinds, arXiv:2411.15124",
    ),
    # messages [{role, content}] (system, user, assistant), and more; configurations math, ...
    # Columns checked against: the card of a set made from it (ycchen/nemotron-deepseek-sft-mix),
    # NeMo RL's nemotron_cascade2_sft loader.
    "nemotron_cascade2_sft_math": Preset(
        "nvidia/Nemotron-Cascade-2-SFT-Data",
        {"messages": "messages"},
        subset="math",
        data_kinds=frozenset({"rows"}),
        description="reasoning about mathematics",
    ),
    # id, source, prompt, chosen, rejected (both whole conversations). Columns checked against: code
    # that reads it, such as NeMo RL's loader.
    "tulu3_preference": Preset(
        "allenai/llama-3.1-tulu-3-8b-preference-mixture",
        {"chosen": "chosen", "rejected": "rejected", "id": "id"},
        data_kinds=ROWS_AND_PAIRS,
        description="pairs on and off policy, arXiv:2411.15124",
    ),
    # domain, language, context [{role, content}], response1, response2, overall_preference (-3:
    # first much better, to 3: second much better), individual_preference; splits train, validation.
    # Columns checked against: a card of a copy, NeMo RL's helpsteer3 loader.
    "helpsteer3": Preset(
        "nvidia/HelpSteer3",
        {
            "prompt": "context",
            "first": "response1",
            "second": "response2",
            "preference": "overall_preference",
        },
        subset="preference",
        test="validation",
        keep=({"column": "overall_preference", "none_of": (0,)},),
        data_kinds=ROWS_AND_PAIRS,
        description="pairs compared by people, arXiv:2505.11475",
    ),
    # prompt, prompt_id, chosen, rejected (both whole conversations), messages, score_chosen,
    # score_rejected; splits train_prefs, test_prefs, train_sft, ... Columns checked against: its
    # card; docs/preference-data.md describes the format.
    "ultrafeedback": Preset(
        "HuggingFaceH4/ultrafeedback_binarized",
        {
            "chosen": "chosen",
            "rejected": "rejected",
            "score_chosen": "score_chosen",
            "score_rejected": "score_rejected",
        },
        train="train_prefs",
        test="test_prefs",
        data_kinds=ROWS_AND_PAIRS,
        description="pairs scored by GPT-4, arXiv:2310.01377",
    ),
    # chosen, rejected: both "\n\nHuman: ...\n\nAssistant: ...". Columns checked against: a
    # published file.
    "hh_rlhf": Preset(
        "Anthropic/hh-rlhf",
        {"chosen": "chosen", "rejected": "rejected"},
        test="test",
        data_kinds=ROWS_AND_PAIRS,
        description="helpful and harmless, arXiv:2204.05862",
    ),
    # style, subset, question_id, question, solution, test (pytest, from solution import ...),
    # test_info [{function_name, parameter_list, function_declaration, docstring}],
    # gpt_pass_percentage, gpt_difficulty and more; split train. Columns checked against: the
    # features on the cards of its copies (Blueyyds/KodCode-7K-RL,
    # Sangwoong/kodcode-9k-preprocessed). Tests that call several functions or classes can't judge:
    # the attempts at such rows fail.
    "kodcode": Preset(
        "KodCode/KodCode-V1",
        {"prompt": benchmark_rows.PROMPT_COLUMN, "solution": "solution", "id": "question_id"},
        convert_row=benchmark_rows.convert_kodcode,
        reward="code",
        description="programs with pytest tests, arXiv:2503.02951",
    ),
    # task_id, prompt, entry_point, canonical_solution, test; split test. Columns checked against:
    # the published file.
    "humaneval": Preset(
        "openai/openai_humaneval",
        {"prompt": "prompt", "solution": "canonical_solution", "id": "task_id"},
        train="",
        test="test",
        reward="code",
        description="programs, arXiv:2107.03374",
    ),
}
