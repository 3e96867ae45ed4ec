"""Documents whose code runs as it stands."""

import contextlib
import re
import shlex
import sys

from command_line import ratchet
from support.programs import run_program


def written(page, directory):
    """Write the files that a page shows into a directory, and return their texts by name: each begins
    with its name in a comment."""
    text = page.read_text(encoding="utf-8")
    files = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", text, flags=re.DOTALL))
    assert len(files) == text.count("```") // 2
    for name, code in files.items():
        (directory / name).write_text(code, encoding="utf-8")
    return files


def follow(page, directory):
    """Do what a page says, from top to bottom: write its files, each of which begins with its name
    in a comment, and run the commands of its bash blocks. Blocks without a language are left out.
    """
    text = page.read_text(encoding="utf-8")
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        if language == "bash":
            for line in code.splitlines():
                program, *words = shlex.split(line, comments=True)
                module = {"ratchet": ("-m", "ratchet"), "python": ()}[program]
                run(directory, *module, *words)
            continue
        name = re.match(r"# (\S+)\n", code)
        assert name is not None, code
        (directory / name[1]).write_text(code, encoding="utf-8")


def run(directory, *command):
    """Run Python with these arguments in a directory, and return what it prints."""
    if command[:2] == ("-m", "ratchet"):
        with contextlib.chdir(directory):
            done = ratchet(*command[2:], timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
    return run_program(sys.executable, *command, cwd=directory)
