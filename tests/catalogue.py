"""The faults that Ratchet is held to, each with its safe outcome. A test says which it is of by
`@pytest.mark.fault("R4")`.

The table of docs/reliability.md is made of both: `python tests/catalogue.py` writes it anew.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin (python tests/catalogue.py) -->\n", "<!-- faults: end -->"

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "The recipe": {
        "C1": ("a key that does not exist", "refused with file, line and the nearest key"),
        "C2": ("a number that is none (`1e-5x`)", "refused with its value and what is wanted"),
        "C3": (
            "a batch below 1; a group of 1 where attempts are compared",
            "refused with the reason",
        ),
        "C4": (
            "a batch, or a model, that does not divide",
            "refused with the numbers where it can't be; else shared out, and what ranks are short "
            "of is filled up",
        ),
        "C5": ("learner and generator share devices, and can't", "refused with both keys"),
        "C6": ("an adapter where nobody can train it", "refused with the key to change"),
        "C7": ("no room for a prompt in the context", "refused with the sizes"),
        "C8": (
            "a model directory that is not there",
            "refused; what looks like a path is never downloaded",
        ),
        "C9": ("a key set twice", "refused with both lines"),
        "C10": ("an override of a key that does not exist", "refused, and no silent new key"),
        "C11": (
            "a run directory of another recipe",
            "refused, naming the keys; one that was edited under its run is told",
        ),
        "C12": ("an environment that can't be imported", "refused with its own error"),
        "C13": (
            "a recipe written to hang: anchors that repeat anchors, depth, pipes, chains, sizes of "
            "10^12",
            "refused within a budget of bytes, values, depth and files, with a sentence and status "
            "2",
        ),
        "C14": (
            "NaN, an infinity, `true`, or 10**12 where a number belongs",
            "refused in every section, with the key",
        ),
    },
    "Data": {
        "D1": ("a column that is missing", "refused with file, line and the columns there are"),
        "D2": ("no rows, or none of a split", "refused before the first step"),
        "D3": ("malformed JSON", "refused with line and column"),
        "D4": ("bytes that are not UTF-8", "refused with line and offset"),
        "D5": (
            "a prompt beyond the context",
            "its attempts fail by name and are counted; the run stops where most do",
        ),
        "D6": (
            "the same row, prompt or id twice",
            "groups are told apart by position; a prompt is on one side only",
        ),
        "D7": ("`../../x` as a name", "refused; ids of the data name no file"),
        "D8": ("null or a number where text belongs", "refused with line and column"),
        "D9": (
            "a data file that changed since the checkpoint, or, before the first, since the start",
            "resumption is refused with the file's name, unless allowed",
        ),
        "D10": ("a byte order mark, CRLF", "read as if they were not there"),
        "D11": ("an image that is missing, or lies outside its root", "refused with row and file"),
        "D12": (
            "an address of the web in a row",
            "not fetched unless asked for; one that can't be reached is refused",
        ),
        "D13": (
            "an image or a clip that is empty, cut off or none",
            "refused with row and file, or its attempt fails",
        ),
        "D14": (
            "an image of 20,000 pixels, or a decompression bomb",
            "refused by its header, before it is decoded",
        ),
        "D15": (
            "places for images in a text that are not as many as its images",
            "refused with both counts",
        ),
        "D16": (
            "a pipe or a device as data; JSON of 100,000 levels; a small file that unpacks to "
            "millions of rows",
            "refused with a sentence before it is read",
        ),
        "D17": (
            "a data file that is overwritten in place while a run reads its rows",
            "the run ends with the file's name; it can be resumed with the old content, or allowed "
            "with the new",
        ),
    },
    "Model and numbers": {
        "M1": (
            "a tokenizer without a padding token",
            "none is needed: sequences are laid end to end",
        ),
        "M2": ("a tokenizer without an end of sequence", "refused with the fix"),
        "M3": ("conversations without a chat template", "refused with the fix"),
        "M4": (
            "a loss that is NaN",
            "the step changes no weight and is counted; several in a row end the run",
        ),
        "M5": ("a gradient that is infinite", "the step changes neither weights nor optimizer"),
        "M6": ("a tokenizer with more tokens than the model", "refused with both sizes"),
        "M7": (
            "a sampler that disagrees with the learner",
            "the run stops and says which part is why",
        ),
        "M8": ("a generator that was restarted", "it serves only after it got the current weights"),
        "M9": (
            "a teacher whose tokenizer rewrites the text",
            "where texts differ there is no advantage, and it is counted",
        ),
        "M10": (
            "dropout in steps of different sizes",
            "no two micro-batches, steps or layers share a mask",
        ),
        "M11": (
            "a log-probability far from its counterpart (a ratio beyond float32)",
            "losses, KL estimators and corrections stay finite; the other tokens train",
        ),
        "M12": (
            "an algorithm by a paper's name",
            "its defaults are the paper's objective, normaliser included",
        ),
        "M13": (
            "a model directory with impossible sizes, other types, pipes, or a template that loops "
            "or fills memory",
            "refused by arithmetic or a budget of steps, with a sentence and status 2",
        ),
        "M14": (
            "a model directory that lacks weights",
            "refused with their names, and never filled with random numbers",
        ),
        "M15": (
            "`model.path` holds other weights than the run started from, or is relative and read "
            "elsewhere",
            "`replay` and `explain` say so first, status 1; a run without a checkpoint is not "
            "resumed",
        ),
    },
    "Rollouts": {
        "R1": ("an environment raises", "its attempt fails, and is not a reward; the others go on"),
        "R2": ("an environment hangs", "a deadline ends the attempt; the process is replaced"),
        "R3": (
            "an environment returns something else",
            "its attempt fails and says what was wanted",
        ),
        "R4": ("a reward that is NaN, infinite or no number", "rejected, never averaged"),
        "R5": ("an answer without tokens", "no division by 0, nothing to learn from"),
        "R6": ("all rewards equal", "advantages of 0, no NaN; counted, and told where it lasts"),
        "R7": (
            "an environment that always fails",
            "the run stops and shows what happens most often",
        ),
        "R8": ("a tool that floods", "its output is cut"),
        "R9": ("an environment changes what it was given", "nothing else sees it"),
        "R10": ("an answer after the deadline", "refused or thrown away"),
        "R11": ("an answer that comes twice", "counted once"),
        "R12": (
            "an environment leaves threads and files behind",
            "its process is replaced when they are many, and they end with it",
        ),
        "R13": (
            "every attempt is cut off",
            "counted, and told where it lasts; where nobody judged them they train nothing",
        ),
        "R14": (
            "an attempt ends at the turn limit behind a whole answer",
            "a reward model reads the answer's end of turn",
        ),
        "R15": (
            "a sampling number with which nothing can be drawn",
            "refused by name: in a recipe, a request and Python alike",
        ),
        "R16": (
            "a request that can't be computed",
            "it fails alone; the others end with the bits that they have without it",
        ),
        "R17": (
            "tests of a program that draw without a seed, or read the clock",
            "refused by the task's name, and no silent 0 for right programs",
        ),
        "R18": (
            "a program judged again: in another slot, beside others, after a resumption",
            "the same outcome; what it can see of chance is fixed, or named in docs/sandbox.md",
        ),
        "R19": (
            "attempts of older weights that no ratio corrects",
            "a warning with the fix, before the run and in its log",
        ),
        "R20": (
            "a program or command killed from outside: memory ran out, a service was stopped",
            "it runs again, and then its attempt fails; never 0",
        ),
    },
    "Processes": {
        "P1": ("a generator is killed", "named, or replaced; no request is lost"),
        "P2": (
            "an environment's process is killed",
            "its attempts fail as infrastructure and are played again",
        ),
        "P3": (
            "a reward's process is killed",
            "replaced; what it judged is judged again, and never a 0",
        ),
        "P4": (
            "a learner's rank is killed",
            "the run ends with its name within seconds, and can be resumed",
        ),
        "P5": ("the process of an engine is killed", "named, or replaced with its requests"),
        "P6": (
            "the driver is killed, anywhere",
            "nothing is left over; the resumed run ends with the same bits",
        ),
        "P7": ("a process is stopped", "noticed by its silence, named and killed"),
        "P8": (
            "SIGTERM, Ctrl-C, a closed terminal",
            "the step is finished and saved; 143, 130, 129; a second Ctrl-C or SIGTERM ends it at "
            "once",
        ),
        "P9": (
            "Ctrl-C in the middle of a save",
            "the checkpoint before is whole, and no half one is there",
        ),
        "P10": (
            "the disk is full in the middle of a save",
            "an error; the checkpoint before is whole, the draft is gone",
        ),
        "P11": ("a read-only run directory", "refused at the start"),
        "P12": (
            "the newest checkpoint is damaged",
            "the one before is taken, and the reason is logged",
        ),
        "P13": ("all checkpoints are damaged", "an error: never silently from the beginning"),
        "P14": ("two runs in one directory", "the second is refused, and told by whom"),
        "P15": ("a lock left by a killed run", "taken over"),
        "P16": (
            "workers that die again and again",
            "so many are replaced, ever later, then the run ends",
        ),
        "P17": ("a port that is taken", "named with the fix"),
        "P18": (
            "the clock jumps",
            "deadlines are of the monotonic clock; prompts and weights do not depend on it",
        ),
        "P19": ("metrics that can't be written", "one warning; training goes on"),
        "P20": ("death in the middle of a push of weights", "nobody serves mixed weights"),
        "P21": (
            "a worker runs out of memory",
            "the message says so, or that the kernel may have killed it",
        ),
        "P22": (
            "the run directory is deleted, moved or replaced under its run",
            "the run stops at the end of the step and writes nothing there; what was moved can be "
            "resumed",
        ),
        "P23": (
            "the lock, recipe, metrics or checkpoints of a run are deleted under it",
            "said at the next step or save; the lock and the recipe are restored; nothing is "
            "overwritten",
        ),
        "P24": (
            "a library replaces a signal's handler, or blocks the signal",
            "refused, or, in native code, undone before the next step: the run finishes its step "
            "and saves",
        ),
        "P25": (
            "temporary files of a killed process",
            "the next run removes them, and nothing of a living process or of another user",
        ),
        "P26": (
            "a file of a run becomes a link, a pipe or a directory under it",
            "never followed or waited for: restored, or named by a warning or an error",
        ),
        "P27": (
            "the disk is full beside a save: log, ledger, summary",
            "one warning, or the run ends with a sentence, and can be resumed",
        ),
    },
    "Hostile input": {
        "S1": ("a pickle in a checkpoint", "refused unopened"),
        "S2": ("a checkpoint that points outside of itself", "refused"),
        "S3": ("a file of tensors with a false header", "refused"),
        "S4": ("a request without its key", "refused; only the loopback is listened to"),
        "S5": ("a huge or a slow request", "refused before it is read to its end"),
        "S6": (
            "a route that is not the caller's",
            "there is none: a key opens one session, and weights have no route",
        ),
        "S7": ("a secret in a recipe", "redacted wherever the recipe is written"),
        "S8": ("a model that brings code", "refused unless the recipe asks for it"),
        "S9": (
            "programs written to break out or to cheat",
            "none passes, none leaves anything behind",
        ),
        "S10": (
            "answers written to hang a grader or to run",
            "0 within the deadline; nothing runs",
        ),
        "S11": (
            "quotes, braces, escapes, a megabyte in an answer",
            "inert in the log and in rewards",
        ),
        "S12": ("a machine without a sandbox", "programs are refused, not run bare"),
        "S13": (
            "tests that evaluate what a program returned",
            "refused by the task's name before anything of it runs; an answer that breaks the "
            "tests is a wrong one",
        ),
        "S14": (
            "files that an agent leaves for the check to pick up",
            "the check finds its own alone: they lie apart, and those of the agent only where it "
            "names them",
        ),
        "S15": (
            "clients of a server that are silent, slow, many, leave, or send nonsense",
            "closed at a deadline, the oldest first; others are answered meanwhile; no traceback, "
            "no 500",
        ),
        "S16": (
            "a page of another site that asks a server without a key",
            "refused by its Host or Origin",
        ),
        "S17": (
            "a run of any length, or numbers that no axis holds, in the dashboard",
            "memory is bounded; left out of the chart",
        ),
        "S18": (
            "control characters and marks of direction in data",
            "shown as their codes in everything that is printed",
        ),
        "S19": (
            "a request of millions of JSON values, or of text far longer than the context",
            "refused before it is parsed or tokenized; other requests wait for no more than a "
            "fraction of a second",
        ),
        "S20": (
            "files of a run that are pipes, devices, loops, or of another shape, under `ratchet "
            "ui`",
            "passed over; that run's other files and other runs are shown",
        ),
    },
    "Configurations of other libraries": {
        "I1": (
            "a number that Python reads more generously than its library (`0.5_5`)",
            "read as its library does, or refused by its key",
        ),
        "I2": (
            "a key that is read, and left by the conversion",
            "told as not taken over, whatever the table says",
        ),
        "I3": ("a value that would be cut or rounded", "converted exactly, or refused by its key"),
        "I4": ("a file that is none, or grows as it is read", "one sentence with the file's name"),
        "I5": ("a key that another one replaces, a null, a default of theirs", "each told"),
    },
}
ROWS: dict[str, tuple[str, str]] = {
    name: row for rows in GROUPS.values() for name, row in rows.items()
}


def marked() -> dict[str, list[str]]:
    """By row, the tests that are marked with it, as `path::name` below tests/."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for row, test in marks(path.read_text(encoding="utf-8")):
            found[row].append(f"{path.relative_to(TESTS).as_posix()}::{test}")
    return dict(found)


def marks(source: str) -> Iterator[tuple[str, str]]:
    """(row, test) of every `@pytest.mark.fault(...)` in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.fault":
                    for argument in call.args:
                        assert isinstance(argument, ast.Constant), ast.unparse(call)
                        yield str(argument.value), node.name


def table(tests: Mapping[str, list[str]]) -> str:
    lines = []
    for group, rows in GROUPS.items():
        lines += [
            f"### {group}",
            "",
            "| | What happens | What follows | Tests |",
            "|---|---|---|---|",
        ]
        for name, (fault, outcome) in rows.items():
            lines.append(
                f"| {name} | {fault} | {outcome} | "
                f"{'<br>'.join(f'`{test}`' for test in tests.get(name, []))} |"
            )
        lines.append("")
    return "\n".join(lines)


def written(page: str, tests: Mapping[str, list[str]]) -> str:
    """The page with a new table."""
    before, found, rest = page.partition(BEGIN)
    _, ends, after = rest.partition(END)
    assert found, "the page has no place for the table"
    assert ends, "the page's table has no end"
    return f"{before}{BEGIN}{table(tests)}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), marked()), encoding="utf-8")
