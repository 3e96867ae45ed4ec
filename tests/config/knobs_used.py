"""Uses of what a recipe can name, so that test_knobs.py sees which of its keys are read: rewards,
environments, sandboxes.

Files are written into the working directory, and named as a recipe names them.
"""

import asyncio
import json
import sys
import wave
from base64 import b64decode
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from environments import stand_in_textworld
from environments.harbor.task_directories import write_task
from environments.openenv.stub_server import StubServer
from environments.servers.open_reward_stub import Stub, events, result
from experience.atropos import stand_in
from experience.openai_proxy.talk import RENDERER, Scripted, sampling
from pictures import model_directory, picture
from rewards.fake_http import Answer, chat, serve
from sandbox.fake_docker import PYTHON, FakeDocker
from sandbox.fake_remote import FakeRemote

from ratchet.config.media_limits import MediaConfig
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, import_object, resolve, section_class
from ratchet.config.schema import RunConfig
from ratchet.data.formats.media import decode_audio, decode_video, fetch
from ratchet.data.processor import load_processor
from ratchet.environments.games.game import GameConfig
from ratchet.errors import ConfigError, DataError
from ratchet.executors.local import LocalExecutor
from ratchet.executors.placement import ResourceRequest
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.generators.config import VLLMConfig
from ratchet.generators.vllm import generator as vllm
from ratchet.generators.vllm.generator import VLLMGenerator, choose_dtype, make_engine_arguments
from ratchet.generators.workers.pool import GeneratorPool
from ratchet.learners.config import MegatronConfig
from ratchet.learners.distributed.checks import check_megatron
from ratchet.learners.distributed.role_spec import RoleSpec
from ratchet.learners.distributed.worker import LearnerRank
from ratchet.learners.remote import RemoteLearner
from ratchet.models.load import init_policy
from ratchet.models.model_source import ModelSource
from ratchet.models.scalar_head import ScalarHead, save_head
from ratchet.observe.trackers import TrackedRun
from ratchet.testing.builders import make_trajectory
from ratchet.training.stage_from_config import build_reward
from ratchet.training.workers.generators import get_generator_resources, get_worker_factory
from ratchet.training.workers.judges import get_judge_resources, start_judges
from ratchet.types import Message, Scored, Task, ToolCall
from ratchet.weight_sync.endpoints import LocalRank
from ratchet.weight_sync.factory import SyncEndpoints, make_weight_sync

ENVIRONMENTS = Path(__file__).parents[1] / "environments"

# Rewards, each with an answer and keys that make it read all the others.
REWARDS = {
    "math": ("A", {}),
    "boxed": (r"\boxed{A}", {}),
    "multiple_choice": ("A", {}),
    "format": ("A", {}),
    "regex": ("A", {"pattern": "A"}),
    "similarity": ("A", {}),
    "length": ("too long", {"unit": "characters", "at_most": 1}),
    "repetition": ("A A", {"unit": "words", "ngram": 1}),
    "unwanted_text": ("A", {"texts": ["B"], "token_ids": [1]}),
    "malformed_tool_calls": ("A", {}),
    "bounding_box": ("[0, 0, 1, 1]", {"task_units": "unit"}),
    "ifeval": ("A", {}),
    "crossthinkqa": ("A", {}),
    "detection": (
        "<answer>[{'bbox_2d': [0, 0, 1, 1], 'label': 'a'}]</answer>",
        {"answer_units": "pixels"},
    ),
    "video_r1": ("A", {"kind_column": "question_type"}),
    "code": ("print(1)", {"sandbox": {"kind": "local"}}),
    "by_tag": ("A", {"domains": {"*": [{"kind": "exact_match"}]}}),
}
TASK_ANSWERS = {
    "bounding_box": "[0, 0, 1, 1]",
    "detection": '[{"bbox_2d": [0, 0, 1, 1], "label": "a"}]',
}


def lines(name: str, *rows: dict) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def use_all(model: Path, questions: str, patch: pytest.MonkeyPatch) -> None:
    """model: directory of one, which gets a scalar head. questions: JSON Lines."""
    judged_here()
    judged_by_functions()
    judged_elsewhere(model)
    judged_in_the_run(model)
    judged_in_other_sandboxes()
    environments_of_rows()
    games()
    pictures()
    with_tools(questions)
    environments_of_others(patch)
    in_terminals()
    by_vllm()
    in_processes()
    in_ranks()
    by_links()
    tracked(patch)
    media()


def media() -> None:
    """A picture, a clip and an address, each just within what it may be or just beyond."""
    made = load_processor(model_directory(), media=MediaConfig(root="."))
    assert made is not None
    made.expand(picture(1), where="here")
    with wave.open("clip.wav", "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\0\0" * 80)
    limits = made.limits.model_copy(update={"urls": True})
    decode_audio(
        fetch("clip.wav", where="here", limits=limits, root=limits.root),
        where="here",
        limits=limits,
    )
    decode_video([b64decode(picture(1).value.partition(",")[2])], where="here", limits=limits)
    with pytest.raises(DataError):
        fetch("https://localhost:9/a.png", where="here", limits=limits)


def tracked(patch: pytest.MonkeyPatch) -> None:
    with patch.context() as patched:
        for package in (
            "wandb",
            "mlflow",
            "mlflow.entities",
            "swanlab",
            "trackio",
            "prometheus_client",
            "opentelemetry.trace",
            "opentelemetry.context",
            "opentelemetry.sdk.trace",
            "opentelemetry.sdk.trace.export",
            "opentelemetry.sdk.resources",
            "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        ):
            patched.setitem(sys.modules, package, MagicMock())
        for listens in ("socket.create_server", "ratchet.web.server.ServerThread"):
            patched.setattr(listens, MagicMock())
        run = TrackedRun("run", "id", Path(), {})
        for kind in KINDS["sink"]:
            sink = build(resolve("sink", {"kind": kind}), run)
            sink.write(1, {"number": 1.0})
            sink.close()


def by_links() -> None:
    generator = SimpleNamespace(shares_weights=True)
    for kind in KINDS["weight_sync"]:
        between = SyncEndpoints(
            SimpleNamespace(),
            generator,
            receivers=None if kind == "shared" else LocalRank(generator),
        )
        make_weight_sync(resolve("weight_sync", {"kind": kind}), between)
    for through in ("files", "collective"):
        make_weight_sync(
            resolve("weight_sync", {"kind": "delta", "through": through}),
            SyncEndpoints(SimpleNamespace(), generator),
        )


def in_ranks() -> None:
    """A rank of each spread learner, alone."""
    for kind in ("dtensor", "megatron"):
        _in_rank(resolve("learner", {"kind": kind}))
    in_8_bits = MegatronConfig(fp8="hybrid", weights="bfloat16")
    check_megatron(in_8_bits, init_policy(get_preset("tiny", vocab_size=8), seed=0))


def _in_rank(section) -> None:
    place = SimpleNamespace(rank=0, world_size=1, rendezvous="127.0.0.1:0", device="cpu")
    import_object(section.division_check)(
        section, init_policy(get_preset("tiny", vocab_size=8), seed=0)
    )
    rank = LearnerRank(
        place,
        learner=section.model_dump(mode="json"),
        origin=ModelSource(shape=get_preset("tiny", vocab_size=8)),
    )
    try:
        rank.begin({"policy": RoleSpec(optimizer={})}, {"kind": "sft"})
        RemoteLearner(
            SimpleNamespace(),
            section,
            "policy",
            device="cpu",
            vocab_size=8,
            unit="sequence",
            shares_prefixes=True,
        )
    finally:
        rank.close()


def by_vllm() -> None:
    """As far as it goes without vLLM."""
    config = VLLMConfig(handover_dir=str(Path.cwd()), lora_rank=8)
    dtype = choose_dtype(config, on_cpu=True)
    make_engine_arguments(config, Path(), dtype, 64, on_cpu=True)
    policy = init_policy(get_preset("tiny", vocab_size=8), seed=0)
    with pytest.MonkeyPatch.context() as patch:
        platforms = SimpleNamespace(
            __version__=vllm.VERSION, current_platform=SimpleNamespace(is_cpu=lambda: True)
        )
        patch.setattr(vllm, "find_spec", lambda name: True)
        patch.setattr(vllm, "import_module", lambda name: platforms)
        patch.setattr(
            vllm,
            "CORES",
            dict.fromkeys(
                ("async", "sync"), lambda *arguments: SimpleNamespace(close=lambda: None)
            ),
        )
        asyncio.run(VLLMGenerator(config, policy).close())


def in_processes() -> None:
    executor = LocalExecutor(
        resolve("cluster", {"kind": "local"}), threads=1, device="cpu", preload=()
    )
    workers = resolve(
        "generator",
        {"kind": "workers", "worker": {"kind": "engine"}, "workers": 1, "recovery": "restart"},
    )
    executor.plan([ResourceRequest("learner", 1), *get_generator_resources(workers, on_cpu=True)])
    executor.group("learner")
    get_worker_factory(workers)
    GeneratorPool(workers)
    executor.close()


# --- rewards


def graded(kind: str, **keys):
    """The reward of an answer that is almost what was asked for."""
    return judged(kind, "3+4", "4", **keys).reward


def judged(kind: str, text: str, answer: str, **keys):
    reward = build_reward((resolve("rewards", {"kind": kind, **keys}),))
    assert reward is not None
    messages = (Message("user", "?"), Message("assistant", text))
    trajectory = replace(
        make_trajectory([1], [2]), messages=messages, metrics={"malformed_tool_calls": 1.0}
    )
    meta = {
        "numbers": [3, 4],
        "target": 8,
        "use_all": True,
        "instruction_id_list": ["startend:quotation"],
        "question_type": "OCR",
        "width": 10,
        "height": 10,
    }
    meta |= {"tests": [{"stdin": "", "stdout": "1"}]}
    task = Task("t", answer=answer, messages=messages[:1], meta=meta)
    return asyncio.run(reward.score([trajectory], task))[0]


def judged_here() -> None:
    for kind in ("numeric_answer", "countdown"):  # random weights give no answer that ends
        graded(kind)
    for kind, (text, keys) in REWARDS.items():
        judged(kind, text, TASK_ANSWERS.get(kind, "B"), **keys)


def judged_by_functions() -> None:
    """By reward functions that were written for other libraries, in one file."""
    Path("rewards_of_others.py").write_text(
        "def of_trl(completions, **columns): return [1.0] * len(completions)\n"
        "def make(value): return lambda completions, **columns: [value] * len(completions)\n"
        "def of_verl(data_source, solution_str, ground_truth, extra_info, factor): return factor\n"
        "def of_openrlhf(queries, prompts, labels): return [1.0]\n",
        encoding="utf-8",
    )
    keys = {"trl": {"conversational": True}, "verl": {"reward_kwargs": {"factor": 1.0}}}
    for kind in ("trl", "verl", "openrlhf"):
        function = f"rewards_of_others.py:of_{kind}"
        assert judged(kind, "A", "A", function=function, **keys.get(kind, {})).reward == 1.0
    judged("trl", "A", "A", function="rewards_of_others.py:make", factory_kwargs={"value": 1.0})


def judged_elsewhere(model: Path) -> None:
    """By what is asked over HTTP, which fails at first, and by a model with a scalar head."""
    replies = {
        "judge": chat("Score: 2"),
        "pairwise_judge": chat("Better: A"),
        "remote": {"results": [{"reward": 1.0}]},
    }
    for kind, reply in replies.items():
        with serve(
            lambda body, number, reply=reply: reply if number else Answer("busy", 503)
        ) as fake:
            keys = {} if kind == "remote" else {"model": "m"}
            keys |= {"against": "answer"} if kind == "pairwise_judge" else {}
            judged(kind, "A", "B", url=fake.url, backoff_s=1e-3, **keys)
    save_head(ScalarHead(32), model)
    judged("reward_model", "1", "1", path=str(model))


def judged_in_the_run(model: Path) -> None:
    """By models of the run: one answers questions, and one (with the head of above) scores."""
    judges = [
        {"name": "talks", "path": str(model)},
        {"name": "scores", "path": str(model), "kind": "reward_model"},
    ]
    rewards = [
        {"kind": "judge", "judge": "talks", "prompt": "{response}"},
        {"kind": "reward_model", "judge": "scores"},
    ]
    config = RunConfig.model_validate(
        {
            "device": "cpu",
            "model": {"preset": "tiny"},
            "tokenizer": {"kind": "characters"},
            "judges": judges,
            "stages": [
                {
                    "name": "judged",
                    "algorithm": {"kind": "grpo"},
                    "environment": {"kind": "arithmetic"},
                    "rewards": rewards,
                }
            ],
        }
    )
    executor = LocalExecutor(config.cluster, threads=1, device="cpu", preload=())
    executor.plan(get_judge_resources(config))
    started = start_judges(config, executor)
    try:
        assert build_reward(config.stages[0].rewards, started) is not None
        assert asyncio.run(started["scores"].score([[1, 2]]))
        asyncio.run(_ask(started["talks"]))
    finally:
        executor.close()


async def _ask(judge) -> None:
    with pytest.raises(DataError):  # random weights give no answer that ends
        await judge.reply("1", temperature=0.0, max_tokens=1)


def judged_in_other_sandboxes() -> None:
    """Programs, in an image that has to be fetched first, and by a service that fails at first."""
    engine, service = FakeDocker(), FakeRemote()
    docker = {
        "kind": "docker",
        "address": engine.address,
        "python": PYTHON,
        "image": "other:1",
        "pull": True,
    }
    remote = {
        "kind": "remote",
        "address": service.address,
        "offers": "namespaces",
        "retry_wait_s": 1e-3,
    }
    service.faults = ["500"]
    try:
        for sandbox in (docker, remote):
            score = judged("code", "print(1)", "B", sandbox=sandbox, language="block")
            assert isinstance(score, Scored)
    finally:
        engine.close()
        service.close()


# --- environments


def played(*said: Message | str, **keys):
    """An attempt at its first task; gives the environment."""
    environment = build(resolve("environment", keys))

    async def attempt() -> None:
        await environment.reset(next(environment.tasks("train", seed=0)))
        for message in said:
            step = await environment.step(
                message if isinstance(message, Message) else Message("assistant", message)
            )
            if step.done:
                break
        await environment.close()

    asyncio.run(attempt())
    return environment


def games() -> None:
    for kind in KINDS["environment"]:
        if issubclass(section_class("environment", kind), GameConfig):
            environment = played("up", kind=kind)
            environment.demonstration(next(environment.tasks("train", seed=0)))


def pictures() -> None:
    """Drawn, and of rows: within the directory of the file or another, and one that nothing
    fetches."""
    for question in ("count", "colour", "shape", "position"):
        played("1", kind="shapes", questions=[question])
    played("search[lamp]", "1", kind="shop")
    played("zoom 1 1", "zoom 9 9", "1", kind="image_zoom")
    call = Message("assistant", tool_calls=(ToolCall("c", "zoom", {"row": 1, "column": 1}),))
    played(call, "1", kind="image_zoom", actions="tools")
    shown = lines("shown.jsonl", {"images": [picture(1).value], "prompt": "What?", "answer": "1"})
    given = {"kind": "vlm", "train": shown, "test_share": 0.0}
    rows = build(resolve("environment", given))
    rows.drops_too_long_rows(next(rows.tasks("train", seed=0)))
    assert resolve("environment", {**given, "answers": "choice"}).default_reward == {
        "kind": "multiple_choice"
    }
    far = lines("far.jsonl", {"images": ["http://127.0.0.1/a"], "prompt": "?", "answer": "1"})
    for keys in ({"test": shown}, {"train": far}):
        with pytest.raises(DataError):
            build(resolve("environment", {**given, **keys})).rows("train")
    with pytest.raises(DataError, match="can't be loaded"):
        build(resolve("environment", {"kind": "vlm", "hub": "absent/absent"})).rows("train")


def environments_of_rows() -> None:
    pairs = lines("pairs.jsonl", {"prompt": "2+2?", "chosen": "4", "rejected": "5"})
    build(resolve("environment", {"kind": "preferences", "train": pairs})).rows("train")
    given = {
        "kind": "dataset",
        "train": pairs,
        "test_share": 0.0,
        "keep": [{"column": "prompt", "max_chars": 9, "none_of": ["1"]}],
    }
    rows = build(resolve("environment", given))
    rows.drops_too_long_rows(next(rows.tasks("train", seed=0)))
    with pytest.raises(DataError, match="set overlap: drop"):
        build(resolve("environment", {**given, "test": pairs})).rows("train")
    with pytest.raises(DataError, match="can't be loaded"):
        build(resolve("environment", {"kind": "dataset", "hub": "absent/absent"})).rows("train")
    build(resolve("environment", {"kind": "mixture", "parts": [{"kind": "sorting"}]}))
    build(resolve("environment", {"kind": "workers", "worker": {"kind": "sorting"}}))
    next(build(resolve("environment", {"kind": "programs"})).tasks("train", seed=0))
    empty = lines("programs.jsonl", {"prompt": "1", "tests": []})
    programs = build(resolve("environment", {"kind": "programs", "train": empty, "test": empty}))
    with pytest.raises(DataError, match="is also in"):
        programs.rows("train")


def with_tools(questions: str) -> None:
    """Calls of every tool, and a program that is repaired."""
    search = {"kind": "search", "corpus": lines("corpus.jsonl", {"text": "one"})}
    with pytest.raises(DataError, match="can't be loaded"):
        build(resolve("tool", {"kind": "search", "hub": "absent/absent"}))
    server = {"kind": "mcp", "command": [sys.executable, str(ENVIRONMENTS / "mcp_server.py")]}
    tools = [{"kind": "calculator"}, {"kind": "python"}, search, server]
    draw = Message("assistant", tool_calls=(ToolCall("call_0", "draw", {}),))
    played(draw, kind="tool_use", tools=tools, problems={"kind": "arithmetic"})
    call = Message("assistant", tool_calls=(ToolCall("call_0", "calculator", {"expression": "1"}),))
    held_out = lines("held_out.jsonl", {"question": "?", "answer": "!"})
    played(call, "1", kind="tool_use", tools=tools, problems={"kind": "arithmetic"})
    played(call, "1", kind="qa", tools=tools[:1], train=questions)
    played(call, "1", kind="qa", tools=tools[:1], train=questions, test=held_out)
    rows = [{"prompt": f"Print {n}.", "tests": [{"stdin": "", "stdout": f"{n}"}]} for n in range(9)]
    printed = {"kind": "programs", "train": lines("printed.jsonl", *rows)}
    for problems, program in (({"kind": "programs"}, "1/0"), (printed, "print(-1)")):
        judge = {"language": "block"}
        played(*[program] * 3, kind="code_repair", problems=problems, judge=judge)
    arithmetic = {"kind": "arithmetic"}
    played("<code>1</code>", "1", kind="code_interpreter", problems=arithmetic, system="Code.")


def environments_of_others(patch: pytest.MonkeyPatch) -> None:
    """Of other packages, by their own examples."""
    patch.syspath_prepend(ENVIRONMENTS)
    played("left", kind="gymnasium", id="FrozenLake-v1", actions=["left", "down", "right", "up"])
    played("1", kind="gem", path="doubling:Doubling")
    if find_spec("gem"):  # it has no release for later versions of Python than 3.11
        tools = ["environments.gem_tools:with_halving"]
        played("1", kind="gem", id="game:GuessTheNumber-v0-easy", wrappers=tools)
    patch.setitem(sys.modules, "textworld", stand_in_textworld)
    for name in ("a.z8", "a.json", "held/b.z8", "held/b.json"):
        (Path("games") / name).parent.mkdir(parents=True, exist_ok=True)
        (Path("games") / name).touch()
    games = {"train": ["games/*.z8"], "test": "games/held"}
    played("open box", "take key", kind="textworld", commands=True, max_turns=2, **games)
    called = Message("assistant", tool_calls=(ToolCall("call_0", "look", {}),))
    Path("rooms.py").write_text(
        "class Room:\n"
        "    def reset(self, **row): return 'Look.'\n"
        "    def look(self) -> str:\n        'Looks around.'\n        return 'dark'\n"
        "def stay(environments, **columns): return [1.0]\n",
        encoding="utf-8",
    )
    room = {"kind": "trl", "factory": "rooms.py:Room", "tools": [{"kind": "calculator"}]}
    room["reward_funcs"] = ["rooms.py:stay"]
    played(called, "1", **room, max_calling_turns=2)
    assert len(list(build(resolve("environment", room)).tasks("test", seed=0))) == 100
    played(called, "1", **room, problems={"kind": "arithmetic"})
    server = StubServer()
    try:
        played("7", kind="openenv", url=server.url)
        played("7", kind="openenv", url=server.url, actions="tools")
        package = {"kind": "openenv", "path": "nowhere"}
        with pytest.raises(ConfigError, match="nowhere"):
            build(resolve("environment", package)).tasks("test", seed=0)
    finally:
        server.close()
    look = [{"type": "function", "name": "look"}]
    params = [{"responses_create_params": {"input": text, "tools": look}} for text in "ab"]
    files = {"train": lines("gym.jsonl", params[0]), "test": lines("held.jsonl", params[1])}
    with serve(lambda body, number: Answer({"reward": 1.0}, 500 if number == 1 else 200)) as gym:
        played(called, "1", kind="nemo_gym", url=gym.url, show_tool_failures=True, **files)
    box = Stub(call=(events(("end", result())),))
    with serve(box) as box.fake:
        for keys in ({"environment": "box"}, {"test_split": None}):
            played(called, "1", kind="open_reward", url=box.fake.url, **keys)
    played("x", "y", kind="verifiers", taskset="words_taskset", options={"turns": True})
    played(
        "1",
        kind="message_log",
        interface="experience.copying_env:Copying",
        data="experience.copying_env:samples",
        raw_observations=True,
        judges_cut_answers=True,
    )
    play_atropos(patch)


def play_atropos(patch) -> None:
    """A group that an environment of Atropos plays."""
    stand_in.install(patch)
    keys = {"path": "experience.atropos.stand_in:Letters", "config": {"n_items": 3}}
    environment = build(resolve("environment", {"kind": "atropos", "test_tasks": 1, **keys}))
    player = EpisodePlayer(Scripted(["a"]), RENDERER, max_context=4096)
    manager = environment.manager_class(player, lambda: environment, None)
    task = next(environment.tasks("train", seed=0))
    asyncio.run(manager.group(task, sampling(), group_id="g", attempts=1))


def in_terminals() -> None:
    """Commands here, in a container and by a service."""
    row = {"goal": "Write 7 into sum.txt.", "check": "cat ../work/sum.txt", "expected": "7"}
    rows = {
        "train": lines("goals.jsonl", row),
        "test": lines("other_goals.jsonl", {**row, "goal": "Again."}),
    }
    engine, service = FakeDocker(), FakeRemote()
    docker = {"kind": "docker", "address": engine.address}
    remote = {"kind": "remote", "address": service.address, "offers": "namespaces"}
    try:
        for sandbox in ({"kind": "local"}, docker, remote):
            block = "```sh\necho 7 > sum.txt\n```"
            played(block, "Done.", kind="terminal", sandbox=sandbox, **rows).sandbox.close()
        write_task(Path("task"))
        for sandbox in ({"kind": "local"}, docker):
            for split in ("train", "test"):
                harbor = {"kind": "harbor", split: "task", "sandbox": sandbox}
                build(resolve("environment", harbor)).sandbox.close()
        played(block, "Done.", kind="harbor", train="task", test="task").sandbox.close()
    finally:
        engine.close()
        service.close()
