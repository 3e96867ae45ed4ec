"""Convert rows of published benchmarks to the usual form.

The choices of a question are written below it, and tests get the form that the reward `code` reads.
A row converter is a function of a row's values, and of its file and line for errors. It returns the
converted values, with the prompt in the column PROMPT_COLUMN.
"""

from __future__ import annotations

import ast
import base64
import pickletools
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ratchet.data.jsonl import DataRow, check_columns, describe_type
from ratchet.data.tables import Table
from ratchet.errors import DataError
from ratchet.utils.safe_read import parse_json

Values = Mapping[str, Any]
RowConverter = Callable[[Values, str], Values]

PROMPT_COLUMN = "asked"  # the column that row converters add

LETTERS = "ABCDEFGHIJ"
CHOOSE_REQUEST = (
    '\nThink step by step, and end with "The answer is X", where X is the letter of your choice.'
)
CODE_BLOCK_REQUEST = "\nAnswer with the whole program in one block that begins with ```python."
MAX_TESTS_BYTES = 1 << 30  # limit for the tests of one problem, unpacked
# pickle opcodes whose argument is text
TEXT_OPCODES = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
# The imports that LeetCode puts before a solution.
USUAL_IMPORTS = "\n".join(
    f"from {name} import *"
    for name in ("typing", "collections", "itertools", "functools", "heapq", "bisect", "math")
)


class ConvertedTable:
    """A table whose rows are converted when they are read."""

    def __init__(self, table: Table, convert_row: RowConverter) -> None:
        self.table, self.convert_row = table, convert_row

    @property
    def block_sizes(self) -> Sequence[int]:
        return self.table.block_sizes

    def __len__(self) -> int:
        return len(self.table)

    def row(self, index: int) -> DataRow:
        """Return the converted row. Raises DataError if the converter can't read the row."""
        row = self.table.row(index)
        return row._replace(values=dict(self.convert_row(row.values, self.where(index))))

    def where(self, index: int) -> str:
        return self.table.where(index)


# --- multiple choice


def convert_mmlu(values: Values, where: str) -> Values:
    """Convert a row with `choices` and, in `answer`, the index of the correct one."""
    check_columns(values, {"question": str, "choices": list}, where)
    choices = [str(choice) for choice in values["choices"]]
    return {
        **values,
        **_write_choices(
            values["question"], choices, _read_index(values, "answer", choices, where)
        ),
    }


def convert_mmmlu(values: Values, where: str) -> Values:
    """Convert a row with the choices in the columns A to D and the correct letter in `Answer`."""
    letters = "ABCD"
    check_columns(values, dict.fromkeys(("Question", *letters, "Answer"), str), where)
    answer = values["Answer"].strip()
    if len(answer) != 1 or answer not in letters:
        raise DataError(f"{where}: column 'Answer' is {answer!r:.60}, must be A, B, C or D")
    choices = [values[letter] for letter in letters]
    return {**values, **_write_choices(values["Question"], choices, letters.index(answer))}


def convert_mmlu_pro(values: Values, where: str) -> Values:
    """Convert a row with up to ten `options` and, in `answer_index`, the correct one's index."""
    check_columns(values, {"question": str, "options": list}, where)
    choices = [str(choice) for choice in values["options"]]
    return {
        **values,
        **_write_choices(
            values["question"], choices, _read_index(values, "answer_index", choices, where)
        ),
    }


def convert_gpqa(values: Values, where: str) -> Values:
    """Convert a row with one column for the correct answer and three for incorrect answers.

    The choices are shuffled, with the question as the seed.
    """
    columns = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    check_columns(values, dict.fromkeys(("Question", *columns), str), where)
    order = random.Random(values["Question"]).sample(range(len(columns)), len(columns))
    choices = [values[columns[i]].strip() for i in order]
    return {**values, **_write_choices(values["Question"], choices, order.index(0))}


def _read_index(values: Values, column: str, choices: Sequence[str], where: str) -> int:
    """Return the index of the correct choice. In a CSV file it is text."""
    value = values.get(column)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 0 <= value < len(choices) <= len(LETTERS)
    ):
        raise DataError(
            f"{where}: column '{column}' is {value!r:.60}, must be an index from 0 of "
            f"{len(choices)} choices"
        )
    return value


def _write_choices(question: str, choices: Sequence[str], correct: int) -> Values:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return {
        PROMPT_COLUMN: "\n".join([question.strip(), "", *lines]) + CHOOSE_REQUEST,
        "answer": LETTERS[correct],
    }


# --- questions about images and clips


def read_answer_tags(values: Values, where: str) -> Values:
    """Set `answer` to the text of the last <answer></answer> in `solution`."""
    check_columns(values, {"problem": str, "solution": str}, where)
    answer, closing_tag, _ = values["solution"].rpartition("<answer>")[2].partition("</answer>")
    if not closing_tag or not answer.strip():
        raise DataError(
            f"{where}: column 'solution' has no answer in <answer></answer>: add it, or drop the "
            "row"
        )
    return {**values, "answer": answer.strip()}


def convert_avqa(values: Values, where: str) -> Values:
    """Replace "video" by "audio" in the question: the rows have only the sound of each video."""
    check_columns(values, {"question": str, "answer": str}, where)
    return {**values, PROMPT_COLUMN: re.sub(r"\bvideo\b", "audio", values["question"])}


def list_choices(values: Values, where: str) -> Values:
    """Write the `choices` below the question, without letters: the answer is the text of one."""
    check_columns(values, {"question": str, "choices": list, "answer": str}, where)
    choices = [f"- {choice}" for choice in values["choices"]]
    return {**values, PROMPT_COLUMN: "\n".join([values["question"].strip(), *choices])}


def convert_daily_omni(values: Values, where: str) -> Values:
    """Write the lettered `Choice` below the question, and name the clip's two files.

    They are the video without its sound and the sound, in the directory that Videos.tar unpacks to.
    """
    check_columns(values, {"video_id": str, "Question": str, "Choice": list, "Answer": str}, where)
    clip = f"Videos/{values['video_id']}/{values['video_id']}"
    choices = [str(choice) for choice in values["Choice"]]
    return {
        **values,
        "video": f"{clip}_video.mp4",
        "audio": f"{clip}_audio.wav",
        PROMPT_COLUMN: "\n".join([values["Question"].strip(), *choices]) + CHOOSE_REQUEST,
    }


def convert_intent(values: Values, where: str) -> Values:
    """Write the lettered `options` below the problem, and name the clip's file for both media.

    The column `path` or `video` names the file, and `options` is a list or the text of one.
    """
    check_columns(values, {"problem": str, "answer": str}, where)
    path = values.get("video") or values.get("path")
    if not isinstance(path, str):
        raise DataError(f"{where}: neither column 'video' nor 'path' names a file")
    options = values.get("options") or []
    if isinstance(options, str):
        try:
            options = ast.literal_eval(options)
        except (ValueError, SyntaxError):
            options = [options]
    lines = [values["problem"].strip(), *map(str, options)]
    media = {"video": path, "audio": path, "data_type": values.get("data_type", "video")}
    return {**values, **media, PROMPT_COLUMN: "\n".join(lines)}


# --- programs


def convert_humaneval(values: Values, where: str) -> Values:
    """Convert a row whose `prompt` is the beginning of a function."""
    check_columns(values, {"prompt": str, "entry_point": str, "test": str}, where)
    return {
        **values,
        PROMPT_COLUMN: f"Complete this function.{CODE_BLOCK_REQUEST}\n\n```python\n"
        f"{values['prompt']}```",
    }


def convert_mbpp(values: Values, where: str) -> Values:
    """Convert a row whose `test_list` holds assertions that call a function of `code`.

    The sanitized rows have the task in `prompt` and the tests' set-up in `test_imports`. The full
    rows have them in `text` and `test_setup_code`.
    """
    check_columns(values, {"code": str, "test_list": list}, where)
    task = values.get("prompt") if values.get("text") is None else values["text"]
    if not isinstance(task, str) or not all(isinstance(line, str) for line in values["test_list"]):
        raise DataError(
            f"{where}: column 'prompt' (or 'text') must be a string, and 'test_list' an array of "
            "strings"
        )
    setup = [*(values.get("test_imports") or ()), values.get("test_setup_code") or ""]
    name = _find_tested_function(values["code"], values["test_list"], where)
    test = "\n".join(
        [
            *setup,
            "def check(candidate):",
            f"    {name} = candidate",
            *_indent(values["test_list"]),
        ]
    )
    tests = "\n".join(values["test_list"])
    request = f"{CODE_BLOCK_REQUEST}\nIt must pass these tests:\n\n```python\n{tests}\n```"
    # The reward `code` runs the column `prompt` as code, so the task's text must not stay in it.
    return {
        **values,
        PROMPT_COLUMN: task.strip() + request,
        "entry_point": name,
        "test": test,
        "prompt": "",
    }


def _find_tested_function(code: str, tests: Sequence[str], where: str) -> str:
    """Return the name of the function of `code` that the tests call."""
    try:
        defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
        calls = [
            node.func
            for test in tests
            for node in ast.walk(ast.parse(test))
            if isinstance(node, ast.Call)
        ]
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{where}: column 'code' or 'test_list' is not Python: {error}") from error
    names = list(
        dict.fromkeys(
            call.id for call in calls if isinstance(call, ast.Name) and call.id in defined
        )
    )
    if len(names) != 1:
        called = ", ".join(names) or "none"
        raise DataError(
            f"{where}: the tests must call one function that 'code' defines, and they call {called}"
        )
    return names[0]


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {part}" for line in lines for part in line.strip().splitlines()]


def convert_kodcode(values: Values, where: str) -> Values:
    """Convert a row whose `test` holds pytest functions that import functions of `solution`.

    `test_info` names the functions and has their declarations, which the prompt gives: the question
    alone seldom names them.
    """
    check_columns(values, {"question": str, "test": str, "test_info": list}, where)
    infos = [info for info in values["test_info"] if isinstance(info, dict)]
    names = [info.get("function_name") for info in infos]
    if not names or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise DataError(
            f"{where}: column 'test_info' must name the functions that the tests call: drop the row"
        )
    declarations = [
        str(info.get("function_declaration") or f"def {name}").strip()
        for info, name in zip(infos, names, strict=True)
    ]
    called = ", ".join(f"`{declaration}`" for declaration in declarations)
    request = f"\n\nThe tests call {called}.{CODE_BLOCK_REQUEST}"
    return {
        **values,
        PROMPT_COLUMN: values["question"].strip() + request,
        "case_type": "pytest",
        "test_cases": [values["test"]],
    }


def convert_livecodebench(values: Values, where: str) -> Values:
    """Convert a row whose tests are all of the kind "stdin", or all of the kind "functional".

    A "stdin" test has the input and output of a program. A "functional" test has the arguments of
    a method of `Solution` in `starter_code`, each as a line of JSON, and the method's result.
    """
    check_columns(
        values,
        dict.fromkeys(
            ("question_content", "public_test_cases", "private_test_cases", "metadata"), str
        ),
        where,
    )
    tests = [
        *_read_tests(values["public_test_cases"], where),
        *_read_tests(values["private_test_cases"], where),
    ]
    kinds = {test["testtype"] for test in tests}
    starter = values.get("starter_code") or ""
    # These columns may hold megabytes, and `tests` has their content.
    dropped = {"public_test_cases", "private_test_cases"}
    other_values = {name: value for name, value in values.items() if name not in dropped}
    prompt = values["question_content"].strip() + CODE_BLOCK_REQUEST
    if kinds == {"stdin"}:
        prompt += "\nIt reads standard input and writes to standard output."
        return {
            **other_values,
            PROMPT_COLUMN: prompt,
            "tests": [{"stdin": test["input"], "stdout": test["output"]} for test in tests],
        }
    if kinds != {"functional"}:
        raise DataError(
            f"{where}: its tests are of the kinds {sorted(kinds)}, must be all stdin or all "
            "functional"
        )
    name = _parse_json(values["metadata"], f"{where}: column 'metadata'").get("func_name")
    if not isinstance(name, str) or not name.isidentifier():
        raise DataError(f"{where}: column 'metadata' names no func_name, which its tests call")
    prompt += f"\nIt begins with this:\n\n```python\n{starter}\n```"
    prefix = (
        f"{USUAL_IMPORTS}\n\n\ndef call_solution(*arguments):\n    return "
        f"Solution().{name}(*arguments)\n\n\n"
    )
    return {
        **other_values,
        PROMPT_COLUMN: prompt,
        "entry_point": "call_solution",
        "prompt": prefix,
        "test": _write_functional_tests(tests, where),
    }


def _write_functional_tests(tests: Sequence[Values], where: str) -> str:
    lines = [
        "def plain(value):",
        "    return list(value) if isinstance(value, tuple) else value",
        "def check(candidate):",
    ]
    for test in tests:
        arguments = [
            _parse_json(line, f"{where}: a test's input")
            for line in test["input"].split("\n")
            if line.strip()
        ]
        expected = _parse_json(test["output"], f"{where}: a test's output")
        lines.append(
            f"    assert plain(candidate({', '.join(map(repr, arguments))})) == {expected!r}"
        )
    return "\n".join(lines)


def _read_tests(text: str, where: str) -> list[dict[str, str]]:
    """Return the tests in a text: JSON, or pickled JSON packed with zlib and base64.

    Only the pickle's opcodes are read, so no code in it runs.
    """
    try:
        tests = parse_json(text)
    except ValueError:
        try:
            unpacker = zlib.decompressobj()
            pickled = unpacker.decompress(base64.b64decode(text, validate=True), MAX_TESTS_BYTES)
            texts = [
                str(argument)
                for opcode, argument, _ in pickletools.genops(pickled)
                if opcode.name in TEXT_OPCODES
            ]
            tests = (
                parse_json(texts[0]) if len(texts) == 1 and not unpacker.unconsumed_tail else None
            )
        except (ValueError, zlib.error) as error:
            raise DataError(
                f"{where}: its tests are neither JSON nor packed JSON: {error}"
            ) from error
    columns = ("input", "output", "testtype")
    if not isinstance(tests, list) or not all(
        isinstance(test, dict) and all(isinstance(test.get(column), str) for column in columns)
        for test in tests
    ):
        raise DataError(
            f"{where}: its tests are {describe_type(tests)}, must be an array of objects with "
            f"{', '.join(columns)}"
        )
    return tests


def _parse_json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
