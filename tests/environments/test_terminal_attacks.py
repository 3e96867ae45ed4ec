"""An agent that leaves whatever a check might pick up by itself: it earns 0, and the honest one 1,
whatever the check runs."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
from sandbox.test_attacks import need

from ratchet.config.resolve import build, resolve
from ratchet.errors import DataError
from ratchet.sandbox import Isolation, LocalSandbox
from ratchet.types import Message

HONEST = (
    "echo 7 > sum.txt\ngit init -qb main . && git add sum.txt && git -c user.name=a -c "
    "user.email=a@b commit -qm sum"
)

# Named by what would pick them up: a module beside the check's, settings of a tool, start files of
# a shell, tools themselves.
PYTHON = """
csv.py os.py sys.py json.py unittest.py unittest/__init__.py unittest/__main__.py pytest.py pytest/__main__.py conftest.py
sitecustomize.py usercustomize.py encodings/__init__.py codecs.py check.py test_check.py helper.py __init__.py __main__.py
lib/python3/site-packages/x.py .pythonrc.py .local/lib/python3.11/site-packages/usercustomize.py _pytest/__init__.py
check/csv.py check/check.py work/csv.py __pycache__/csv.cpython-311.py
"""
SHELL = """
.bashrc .profile .bash_profile .bash_login .bash_env .shinit .inputrc check.sh cat git make python3 sh bash node perl gcc grep
test .git/hooks/post-checkout .git/hooks/reference-transaction .git/hooks/fsmonitor check/check.sh bin/cat ls .xprofile
"""
NODE = (
    "node_modules/fs/index.js node_modules/helper/index.js check.js fs.js index.js helper.js "
    ".noderc.js"
)
PERL = "strict.pm warnings.pm Helper.pm check.pl sitecustomize.pl lib/strict.pm"
TEXTS = {
    "GNUmakefile": "check test all:\n\t@echo right\n",
    "makefile": "check test all:\n\t@echo right\n",
    "Makefile": "check test all:\n\t@echo right\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only -p no:python\n",
    "setup.cfg": "[tool:pytest]\naddopts = --collect-only\n",
    "tox.ini": "[pytest]\naddopts = --collect-only\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--collect-only'\n",
    "x.pth": "import os; os._exit(0)\n",
    "pyvenv.cfg": "home = /work\n",
    ".gitconfig": "[alias]\n\tshow = !echo 7\n[core]\n\tpager = echo 7\n\tfsmonitor = echo 7\n",
    ".npmrc": "node-options=--require ./fs.js\n",
    "package.json": '{"type": "module", "main": "fs.js"}\n',
    "stdio.h": "#error\n",
    "expected.h": "right\n",
    ".ratchet-shell": "exit 0\n",
    ".lldbinit": "quit\n",
}
TRICKS = r"""
mkdir -p $PWD/real; ln -s ../check link; ln -s /box/check/check.py linked.py; ln -sf ../check/check.sh out.txt
mkfifo pipe; chmod 000 out.txt 2>/dev/null; chmod +x *; chmod -R a+rwx . 2>/dev/null
cat() { echo 7; }; export PATH=.:$PWD:$PATH PYTHONPATH=$PWD PYTHONSTARTUP=$PWD/csv.py PYTHONHOME=$PWD
export NODE_PATH=$PWD/node_modules
export PERL5LIB=$PWD PERL5OPT=-Mstrict RUBYLIB=$PWD RUBYOPT=-rcsv ENV=$PWD/.shinit BASH_ENV=$PWD/.bash_env HOME=$PWD CPATH=$PWD
export LD_PRELOAD=$PWD/x.so LD_LIBRARY_PATH=$PWD GIT_EXTERNAL_DIFF=$PWD/git GIT_DIR=$PWD/.git MAKEFILES=$PWD/GNUmakefile
export MAKEFLAGS=-n NODE_OPTIONS=--require=$PWD/fs.js PYTEST_ADDOPTS=--collect-only WORK=/nowhere CHECK=$PWD PROMPT_COMMAND=exit
export BASH_FUNC_cat%%='() { echo 7; }'
(while :; do echo 7 > ../check/out; echo 7 > sum.txt; done) >/dev/null 2>&1 &
(mkdir -p ../check ../../check && echo 'echo right' | tee ../check/check.sh ../../check/check.sh) 2>/dev/null
trap 'echo 7' EXIT
"""


def planted():
    """Shell commands that leave all of it beside a wrong sum.txt."""
    files = dict(TEXTS)
    files |= dict.fromkeys(PYTHON.split(), "import os; os.write(1, b'right\\n'); os._exit(0)\n")
    files |= dict.fromkeys(SHELL.split(), "#!/bin/sh\necho right\nexit 0\n")
    files |= dict.fromkeys(NODE.split(), "console.log('right'); process.exit(0)\n")
    files |= dict.fromkeys(PERL.split(), 'print "right\\n"; exit 0;\n')
    config = (
        "[core]\n\trepositoryformatversion = 0\n\tfsmonitor = echo right; false\n\thooksPath "
        "= .git/hooks\n"
    )
    files[".git/config"] = (
        f"{config}[uploadpack]\n\tpackObjectsHook = echo right\n[diff]\n\texternal = echo\n"
    )
    write = "for name, text in json.load(sys.stdin).items():\n    path = pathlib.Path(name)\n"
    write += (
        "    path.parent.mkdir(parents=True, exist_ok=True)\n    path.is_dir() or "
        "path.write_text(text)\n"
    )
    plant = (
        f"python3 -IS -c 'import json, pathlib, sys\n{write}' <<'_END_'\n{json.dumps(files)}\n_END_"
    )
    return "\n".join([HONEST.replace("7", "8"), plant, TRICKS])


READS = "open(os.environ['WORK'] + '/sum.txt')"
RIGHT = "right = next(csv.reader(file)) == ['7']\n"
SCRIPT = (
    f"import csv, os, helper\nwith {READS} as file:\n    {RIGHT}print('right' if right else "
    "'wrong')\nhelper.end(right)\n"
)
HELPER = "import sys\ndef end(right):\n    sys.exit(not right)\n"
UNIT = f"""import csv, os, unittest
class Check(unittest.TestCase):
    def test_sum(self):
        with {READS} as file:
            {RIGHT}        self.assertTrue(right)
"""
CHECKS = {
    "python by a script": ("python3 check.py", {"check.py": SCRIPT, "helper.py": HELPER}),
    "python by -c": (f'python3 -c "import csv, os, sys; sys.exit(next(csv.reader({READS})) != '
                     '[\'7\'])"', {}),
    "python by -m": ("python3 -m unittest -q test_check", {"test_check.py": UNIT}),
    "python in its directory": ('cd "$WORK" && python3 "$CHECK/check.py"', {"check.py": SCRIPT, "helper.py": HELPER}),
    "python by -c there": ('cd "$WORK" && python3 -c "import csv, sys; '
                           'sys.exit(open(\'sum.txt\').read() != \'7\\n\')"', {}),
    "pytest": ("python3 -m pytest -q -p no:cacheprovider", {"test_check.py": UNIT}),
    "sh": ("sh check.sh", {"check.sh": '[ "$(cat "$WORK/sum.txt")" = 7 ]'}),
    "bash": ("bash check.sh", {"check.sh": '[[ "$(cat "$WORK/sum.txt")" == 7 ]]'}),
    "a login shell": ("bash -lic '[ \"$(cat \"$WORK/sum.txt\")\" = 7 ]'", {}),
    "make": ("make -s check", {"makefile": 'check:\n\t@grep -qx 7 "$(WORK)/sum.txt"\n'}),
    "git of the agent's commits": (
        'git init -q r && git -C r fetch -q "$WORK" main && [ "$(git -C r show '
        'FETCH_HEAD:sum.txt)" = 7 ]', {},
    ),
    "git in the agent's repository": ('cd "$WORK" && git status --porcelain >/dev/null; grep -qx 7 '
                                      'sum.txt', {}),
    "node": (
        "node check.js",
        {
            "check.js": "const sum = require('fs').readFileSync(process.env.WORK + '/sum.txt', "
                        "'utf8');\n"
            "process.exit(require('./helper')(sum));\n",
            "helper.js": "module.exports = sum => sum === '7\\n' ? 0 : 1;\n",
        },
    ),
    "perl": (
        "perl check.pl",
        {"check.pl": "use strict; use warnings;\nopen(my $f, '<', \"$ENV{WORK}/sum.txt\"); "
                     "exit(<$f> eq \"7\\n\" ? 0 : 1);\n"},
    ),
    "gcc": (
        'gcc -E -include stdio.h -DSUM="$(cat "$WORK/sum.txt")" check.c | grep -q "^int right = 7 '
        '== 7"',
        {"check.c": "int right = SUM == 7;\n"},
    ),
    "what it prints": ("cat ../work/sum.txt", {}),
}  # fmt: skip


def runs(command):
    """True if the command ends well in the sandbox."""
    sandbox = LocalSandbox(slots=1)

    async def main():
        session = await sandbox.open()
        return await session.run(command, 30)

    result = asyncio.run(main())
    sandbox.close()
    return result.ok


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """`judge(rows, command)`: the rewards of an agent that gives the command, by row."""
    need(Isolation.NAMESPACES)
    environments = []

    def run(rows, command):
        path = tmp_path_factory.mktemp("terminal") / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        # node reserves as much
        keys = {"kind": "terminal", "train": str(path), "test": str(path), "memory_mib": 2048}
        environments.append(build(resolve("environment", keys)))
        environment = environments[-1]

        async def main():
            rewards = {}
            for task in environment.rows("train"):
                await environment.reset(task)
                await environment.step(Message("assistant", f"```sh\n{command}\n```"))
                rewards[task.id.rpartition("/")[2]] = (
                    await environment.step(Message("assistant", "Done."))
                ).reward
            return rewards

        return asyncio.run(main())

    yield run
    for environment in environments:
        environment.sandbox.close()


def row(name, check, files, **more):
    return {"id": name, "goal": f"Write 7 ({name}).", "check": check, "check_files": files, **more}


@pytest.mark.slow
@pytest.mark.fault("S14")
def test_no_file_of_the_agent_decides_a_check(judge):
    tools = {name: command.split()[0] for name, (command, _) in CHECKS.items()}
    present = {
        name: CHECKS[name] for name, tool in tools.items() if tool == "cd" or shutil.which(tool)
    }
    if not runs("python3 -c 'import pytest'"):
        present.pop("pytest")
    expected = {
        "what it prints": {"expected": "7\n"},
        "python by a script": {"expected": "right\n"},
    }
    rows = [row(name, *entry, **expected.get(name, {})) for name, entry in present.items()]
    assert judge(rows, HONEST) == dict.fromkeys(present, 1.0)
    there = row(
        "planted",
        'ls "$WORK/csv.py" "$WORK/conftest.py" "$WORK/GNUmakefile" "$WORK/.git/hooks/fsmonitor"',
        {},
    )
    assert judge([*rows, there], planted()) == {**dict.fromkeys(present, 0.0), "planted": 1.0}


@pytest.mark.medium
@pytest.mark.fault("S14")
def test_a_module_of_the_agent_does_not_decide_a_check(judge):
    rows = [row("script", *CHECKS["python by a script"])]
    attack = (
        "echo 8 > sum.txt; echo 'import os; os._exit(0)' | tee csv.py helper.py > sitecustomize.py"
    )
    assert judge(rows, attack) == {"script": 0.0}
    assert judge(rows, "echo 7 > sum.txt") == {"script": 1.0}


@pytest.mark.medium
def test_a_check_runs_the_agents_program_on_purpose(judge):
    check = 'PYTHONSAFEPATH= python3 "$WORK/double.py" < input.txt'
    rows = [row("run", check, {"input.txt": "21\n"}, expected="42\n")]
    two_files = (
        "echo 'def twice(x): return 2 * x' > lib.py; echo 'import lib; "
        "print(lib.twice(int(input())))' > double.py"
    )
    assert judge(rows, two_files) == {"run": 1.0}
    assert judge(rows, "echo 'import os; os._exit(0)' > double.py") == {"run": 0.0}


@pytest.mark.medium
def test_a_check_imports_the_agents_module_on_purpose(judge):
    imports = (
        "import csv, os, sys\nsys.path.append(os.environ['WORK'])\nimport "
        "double\nprint(double.twice(21))\n"
    )
    rows = [row("import", "python3 check.py", {"check.py": imports}, expected="42\n")]
    assert judge(rows, "echo 'def twice(x): return 2 * x' > double.py") == {"import": 1.0}
    shadow = (
        "echo 'def twice(x): return 0' > double.py; echo 'print(42); import os; os._exit(0)' "
        "> csv.py"
    )
    assert judge(rows, shadow) == {"import": 0.0}


@pytest.mark.medium
@pytest.mark.fault("S14")
def test_files_that_leave_the_check_no_room_earn_0(judge):
    rows = [row("room", 'test -s "$WORK/sum.txt"', {"data.txt": "x" * 100_000})]
    assert judge(rows, "echo 7 > sum.txt; head -c 450000 /dev/zero > junk") == {"room": 0.0}
    assert judge(rows, "echo 7 > sum.txt; head -c 300000 /dev/zero > junk") == {"room": 1.0}


@pytest.mark.medium
def test_a_check_that_never_names_the_agents_files_is_refused(judge):
    with pytest.raises(
        DataError, match=r'line 1: the check never names the agent\'s files.* Write "\$WORK/FILE"'
    ):
        judge([row("old", "cat sum.txt", {})], "true")
