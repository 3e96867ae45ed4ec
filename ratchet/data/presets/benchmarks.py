"""Presets of published benchmarks, for evaluation only.

A comment before each preset lists the columns of the published dataset. After "Columns checked
against" it names the card, file or code that shows them. `ratchet.data.presets.datasets` has the
presets for training; gsm8k and aime_* there are also benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.data.formats import benchmark_rows
from ratchet.data.presets.datasets import BOXED_REQUEST, PRESETS, Preset

FOUR_CHOICES, TEN_CHOICES = (
    {"kind": "multiple_choice", "letters": letters} for letters in ("ABCD", benchmark_rows.LETTERS)
)
# Value of `Preset.data_kinds` for a benchmark: it has prompts for rollouts, and no rows to imitate.
ROLLOUTS_ONLY = frozenset({"rollouts"})

BENCHMARKS: Mapping[str, Preset] = {
    # problem, solution, answer, subject, level (1 to 5), unique_id; 500 rows, split test. Columns
    # checked against: the features on the cards of its copies (lmms-lab/MATH500,
    # macabdul9/MATH-500).
    "math_500": Preset(
        "HuggingFaceH4/MATH-500",
        {
            "prompt": "problem",
            "answer": "answer",
            "solution": "solution",
            "difficulty": "level",
            "id": "unique_id",
        },
        train="",
        test="test",
        prompt="{problem}" + BOXED_REQUEST,
        tag="subject",
        reward="math",
        description="competition problems, arXiv:2305.20050",
    ),
    # Question, Correct Answer, Incorrect Answer 1 to 3, High-level domain, Record ID and many more;
    # configurations gpqa_diamond (198 rows), gpqa_main, gpqa_extended, each with one split, train;
    # also published as the file gpqa_diamond.csv; the Hub asks for consent. Columns checked
    # against: the loaders of lm-evaluation-harness (tasks/gpqa), NeMo RL and inspect_evals.
    "gpqa": Preset(
        "Idavidrein/gpqa",
        {"prompt": benchmark_rows.PROMPT_COLUMN, "answer": "answer"},
        subset="gpqa_diamond",
        train="",
        test="train",
        convert_row=benchmark_rows.convert_gpqa,
        tag="High-level domain",
        data_kinds=ROLLOUTS_ONLY,
        reward=FOUR_CHOICES,
        description="graduate-level science, arXiv:2311.12022",
    ),
    # question, subject, choices (four), answer (an index); configurations all and one for each
    # subject; splits test, validation, dev. Columns checked against: lm-evaluation-harness's
    # template (question, choices[0..3], answer), other code that reads it.
    "mmlu": Preset(
        "cais/mmlu",
        {"prompt": benchmark_rows.PROMPT_COLUMN, "answer": "answer"},
        subset="all",
        train="",
        test="test",
        convert_row=benchmark_rows.convert_mmlu,
        tag="subject",
        data_kinds=ROLLOUTS_ONLY,
        reward=FOUR_CHOICES,
        description="57 subjects, arXiv:2009.03300",
    ),
    # an unnamed index, Question, A, B, C, D, Answer (a letter), Subject; MMLU's test split in 14
    # languages; configurations default (all), AR_XY, BN_BD, DE_DE, ...; split test. The files
    # mmlu_DE-DE.csv of simple-evals have the same columns. Columns checked against: NeMo RL's mmlu
    # loader.
    "mmmlu": Preset(
        "openai/MMMLU",
        {"prompt": benchmark_rows.PROMPT_COLUMN, "answer": "answer"},
        subset="default",
        train="",
        test="test",
        convert_row=benchmark_rows.convert_mmmlu,
        tag="Subject",
        data_kinds=ROLLOUTS_ONLY,
        reward=FOUR_CHOICES,
        description="MMLU in 14 languages, arXiv:2009.03300",
    ),
    # question_id, question, options (up to ten), answer (a letter), answer_index, cot_content,
    # category, src; splits test, validation. Columns checked against: its card.
    "mmlu_pro": Preset(
        "TIGER-Lab/MMLU-Pro",
        {"prompt": benchmark_rows.PROMPT_COLUMN, "answer": "answer", "id": "question_id"},
        train="",
        test="test",
        convert_row=benchmark_rows.convert_mmlu_pro,
        tag="category",
        data_kinds=ROLLOUTS_ONLY,
        reward=TEN_CHOICES,
        description="harder questions with ten choices, arXiv:2406.01574",
    ),
    # key, prompt, instruction_id_list, kwargs (an object for each instruction; Arrow adds null for
    # missing keys); 541 rows, split train, published as the file ifeval_input_data.jsonl. Columns
    # checked against: its card, lm-evaluation-harness's reader (tasks/ifeval/utils.py).
    "ifeval": Preset(
        "google/IFEval",
        {"prompt": "prompt", "id": "key"},
        train="",
        test="train",
        data_kinds=ROLLOUTS_ONLY,
        reward="ifeval",
        description="verifiable instructions, arXiv:2311.07911",
    ),
    # task_id, prompt, entry_point, canonical_solution, test; 164 rows, split test. Columns checked
    # against: the published file.
    "humaneval_chat": Preset(
        "openai/openai_humaneval",
        {"prompt": benchmark_rows.PROMPT_COLUMN, "solution": "canonical_solution", "id": "task_id"},
        train="",
        test="test",
        convert_row=benchmark_rows.convert_humaneval,
        data_kinds=ROLLOUTS_ONLY,
        reward="code",
        description="programs, arXiv:2107.03374, with prompts for chat models",
    ),
    # sanitized (427 rows): task_id, prompt, code, test_imports, test_list, source_file; full (974
    # rows): the column prompt is named text, test_imports is named test_setup_code, and
    # challenge_test_list is added; splits train, test, validation, prompt. Columns checked against:
    # its card, lm-evaluation-harness's mbpp.yaml.
    "mbpp": Preset(
        "google-research-datasets/mbpp",
        {"prompt": benchmark_rows.PROMPT_COLUMN, "id": "task_id", "solution": "code"},
        subset="sanitized",
        train="",
        test="test",
        convert_row=benchmark_rows.convert_mbpp,
        data_kinds=ROLLOUTS_ONLY,
        reward="code",
        description="small programs, arXiv:2108.07732",
    ),
    # question_title, question_content, platform, question_id, contest_id, contest_date,
    # starter_code, difficulty, public_test_cases, private_test_cases (JSON; in the lite set packed
    # by pickle, zlib and base64), metadata (JSON with func_name); split test, files test.jsonl to
    # test6.jsonl. The Hub's loading script is no longer run by `datasets`, so give the file:
    # test=hf://datasets/livecodebench/code_generation_lite/test6.jsonl. Columns checked against:
    # LiveCodeBench's own lcb_runner/benchmarks/code_generation.py, the features on the card of a
    # copy.
    "livecodebench": Preset(
        "livecodebench/code_generation_lite",
        {"prompt": benchmark_rows.PROMPT_COLUMN, "id": "question_id"},
        train="",
        test="test",
        convert_row=benchmark_rows.convert_livecodebench,
        tag="difficulty",
        data_kinds=ROLLOUTS_ONLY,
        reward={"kind": "code", "timeout_s": 6},
        description="contest problems by date, arXiv:2403.07974",
    ),
}

# Other names of benchmarks that `ratchet eval --on` accepts.
ALIASES: Mapping[str, str] = {
    "math-500": "math_500",
    "mmlu-pro": "mmlu_pro",
    "aime24": "aime_2024",
    "aime25": "aime_2025",
    "humaneval": "humaneval_chat",
}
BENCHMARK_NAMES = frozenset(
    {*BENCHMARKS, *(name for name, preset in PRESETS.items() if preset.test and preset.reward)}
)
