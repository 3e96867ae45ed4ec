"""Every attack, at each level and as each kind of user: none passes, none reaches the trainer,
nothing stays."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox import corpus
from sandbox.attacks import ANSWER, ATTACKS

from ratchet.sandbox import Isolation, LocalSandbox, output_matches

HERE = Path(__file__).resolve().parent
LEVELS = (Isolation.NAMESPACES, Isolation.LANDLOCK)


def granted() -> Isolation:
    sandbox = LocalSandbox(slots=1, at_least=Isolation.SECCOMP)
    sandbox.close()
    return sandbox.isolation


def need(level: Isolation) -> None:
    if granted() < level:
        pytest.skip(f"this machine grants no {level.name.lower()}")


def test_the_corpus_is_large_and_its_names_are_distinct() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("level", [LEVELS[0], pytest.param(LEVELS[1], marks=pytest.mark.slow)])
@pytest.mark.fault("S9")
def test_no_attack_passes_or_leaves_anything_behind(level: Isolation) -> None:
    need(level)
    isolation, problems = corpus.find_problems(level)
    assert isolation is level
    assert problems == []


def as_nobody(*words: str) -> dict[str, object]:
    if os.getuid() != 0:
        pytest.skip("the other tests run as an unprivileged user already")
    command = [sys.executable, str(HERE / "as_nobody.py"), *words]
    environment = {"PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent}"}
    return json.loads(
        subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, timeout=300
        ).stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_no_attack_passes_or_leaves_anything_behind_for_an_unprivileged_user(
    level: Isolation,
) -> None:
    need(level)
    said = as_nobody(str(HERE / "corpus.py"), level.name)
    assert said == {"isolation": level.name, "count": len(ATTACKS), "problems": []}


@pytest.mark.slow
def test_where_namespaces_are_refused_landlock_is_chosen_and_holds() -> None:
    need(Isolation.NAMESPACES)  # or there is nothing to take away
    said = as_nobody("--no-namespaces", str(HERE / "corpus.py"), "NAMESPACES")
    assert said == {"isolation": "LANDLOCK", "count": len(ATTACKS), "problems": []}


def test_the_corpus_notices_a_sandbox_that_is_too_weak(tmp_path: Path) -> None:
    """The control: the weakest level lets programs read this user's files, and then those attacks
    do pass."""
    through = ("reads_a_file_of_the_trainer", "reads_the_expected_answer", "climbs_by_dots")

    async def run() -> list[bool]:
        chosen = [attack for attack in ATTACKS if attack.name in through]
        return [
            output_matches(await corpus.attack(sandbox, attack, places), ANSWER)
            for attack in chosen
        ]

    with corpus.targets(tmp_path) as places:
        sandbox = LocalSandbox(slots=1, at_least=Isolation.SECCOMP, at_most=Isolation.SECCOMP)
        assert asyncio.run(run()) == [True] * len(through)
        sandbox.close()
