"""What each tracker has kept offline, read back by its own library, is what metrics.jsonl says."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from ratchet.config.resolve import build
from ratchet.errors import ConfigError
from ratchet.observe.config import (
    MlflowConfig,
    PrometheusConfig,
    SwanlabConfig,
    TrackioConfig,
    WandbConfig,
)
from ratchet.observe.metrics import StepMetrics
from ratchet.observe.reducers import Histogram
from ratchet.observe.sinks import Metrics, read_jsonl
from ratchet.observe.trackers import (
    PrometheusSink,
    TrackedRun,
    build_trackers,
    flatten_settings,
    get_run_id,
    select_finite,
)
from ratchet.testing.builders import make_trajectory
from ratchet.training.start import resume_run, start_run
from ratchet.types import (
    Failed,
    Group,
    Message,
    Outcome,
    Part,
    Scored,
    Task,
    ToolCall,
    Trajectory,
    Truncated,
)

pytestmark = pytest.mark.slow

NAME = "rollout/length_histogram"
LENGTHS = Histogram(
    edges=(0.0, 1.0, 2.0, 4.0), counts=(1, 0, 2), lowest=0.5, highest=3.0, total=6.5, squares=18.25
)


def make_groups() -> list[Group]:
    """Two groups; the first has two attempts, of which one failed."""

    def attempt(messages: tuple[Message, ...], outcome: Outcome) -> Trajectory:
        return replace(make_trajectory([1], [2, 3], outcome=outcome), messages=messages)

    shown = Message("user", (Part("text", "See "), Part("image", "data:x")))
    call = Message("assistant", tool_calls=(ToolCall("1", "add", {"a": 1}),))
    tasks = (Task("t1", (shown,), tag="maths"), Task("t2", (Message("user", "x" * 20_001),)))
    first = (
        attempt((shown, call), Scored(1.0)),
        attempt((shown, Message("assistant", "5")), Failed("tool", "")),
    )
    own_prompt = (Message("user", "y"), Message("assistant", "half \ud800"))
    second = (attempt(own_prompt, Truncated(None)),)
    return [Group("g1", tasks[0], first), Group("g2", tasks[1], second)]


ROLLOUTS = [
    [3, "t1", "maths", "user: See [image]", 'assistant: add({"a": 1})', 1.0, "scored", 3],
    [
        3,
        "t2",
        "",
        f"user: {'x' * 4994}\n[10,007 characters left out]\n{'x' * 5000}",
        "user: y\nassistant: half \\ud800",
        None,
        "truncated",
        3,
    ],
]
STEPS: list[Metrics] = [
    {"rollout/reward": 0.1, "policy/loss": -1.5, "rollout/reward/a b@c": 3.0},
    {"rollout/reward": 1 / 3, "policy/loss": None, "policy/loss/nan": 1.0},
    StepMetrics(
        {"rollout/reward": 0.7, "policy/loss": 1e-30, "eval/accuracy": 0.25},
        {NAME: LENGTHS},
        make_groups(),
    ),
]
Rows = dict[int, dict[str, float]]


@pytest.fixture
def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def tracked(path: Path, *, is_resumed: bool = False) -> TrackedRun:
    return TrackedRun(
        "quick", get_run_id(path), path, {"seed": 0, "stages": [{"name": "only"}]}, is_resumed
    )


def expected(steps: list[Metrics]) -> Rows:
    return {step: select_finite(metrics) for step, metrics in enumerate(steps, 1)}


WRITE = """
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from observe.test_trackers import STEPS, tracked
from ratchet.config.resolve import build, resolve

kind, path, keys = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
section = resolve("sink", {"kind": kind, **keys})
for first, last in ((0, 2), (2, 3)):  # a run and its resumption
    sink = build(section, tracked(path, is_resumed=first > 0))
    for step in range(first, last):
        sink.write(step + 1, STEPS[step])
    sink.close()
"""


def written_apart(kind: str, path: Path, keys: Mapping[str, Any]) -> None:
    """In a process of its own: trackers leave threads and hooks behind."""
    tests = Path(__file__).resolve().parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
        "TRACKIO_DIR": str(path / "trackio"),
    }
    command = [sys.executable, "-c", WRITE, kind, str(path), json.dumps(keys)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


# --- each by its own library


def wandb_rows(path: Path) -> Rows:
    """The messages are W&B's own; of the file around them, its package has no reader in Python:
    SwanLab's converter has one."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    rows: Rows = {}
    for file in sorted((path / "wandb").glob("offline-run-*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(str(file))
            for data in iter(reader.scan, None):
                record = Record.FromString(data)
                if record.WhichOneof("record_type") == "history":
                    items = {
                        "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                        for item in record.history.item
                    }
                    step = items.pop("_step")
                    rows[step] = {
                        name: value for name, value in items.items() if not name.startswith("_")
                    }
    return rows


def swanlab_rows(path: Path) -> Rows:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    rows: Rows = {}
    for file in sorted((path / "swanlog").glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "scalar":
                rows.setdefault(record.scalar.step, {})[record.scalar.key] = (
                    record.scalar.value.number
                )
        reader.close()
    return rows


def mlflow_rows(path: Path) -> Rows:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("ratchet")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    rows: Rows = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            rows.setdefault(metric.step, {})[name] = metric.value
    return rows


READ_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("ratchet")
print(json.dumps(SQLiteStorage.get_logs("ratchet", run), default=str))
"""


def trackio_rows(path: Path) -> Rows:
    """Its directory is that of the environment at import."""
    environment = {**os.environ, "TRACKIO_DIR": str(path / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", READ_TRACKIO],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    logs: list[dict[str, Any]] = json.loads(done.stdout)
    return {
        log["step"]: {
            name: value for name, value in log.items() if name not in ("step", "timestamp")
        }
        for log in logs
    }


HISTOGRAMS = {  # of those that know such, as they keep them
    "wandb": {
        f"{NAME}/_type": "histogram",
        f"{NAME}/values": [1, 0, 2],
        f"{NAME}/bins": [0.0, 1.0, 2.0, 4.0],
    },
    "trackio": {
        NAME: {"_type": "trackio.histogram", "values": [1, 0, 2], "bins": [0.0, 1.0, 2.0, 4.0]}
    },
}
KEYS: dict[str, dict[str, Any]] = {
    "wandb": {"mode": "offline", "rollouts": 2, "rollouts_every": 3},
    "swanlab": {"mode": "offline"},
    "mlflow": {},
    "trackio": {"rollouts": 2, "rollouts_every": 3},
}


def take_wandb_table(path: Path, row: dict[str, Any]) -> list[list[Any]]:
    """Return the table's rows from the file that the step names, and remove its entries."""
    entries = {name: row.pop(name) for name in list(row) if name.startswith("rollouts/")}
    (file,) = (path / "wandb").glob(f"offline-run-*/files/{entries['rollouts/path']}")
    return json.loads(file.read_text())["data"]


def take_trackio_table(path: Path, row: dict[str, Any]) -> list[list[Any]]:
    del path
    return [list(attempt.values()) for attempt in row.pop("rollouts")["_value"]]


TABLES = {"wandb": take_wandb_table, "trackio": take_trackio_table}
READERS = {
    "wandb": wandb_rows,
    "swanlab": swanlab_rows,
    "mlflow": mlflow_rows,
    "trackio": trackio_rows,
}


@pytest.mark.needs("wandb", "mlflow", "swanlab", "trackio")
@pytest.mark.parametrize(
    "kind",
    ["trackio", "wandb", "swanlab", "mlflow"],
)
def test_what_was_kept_offline(kind: str, tmp_path: Path) -> None:
    written_apart(kind, tmp_path, KEYS[kind])
    found = READERS[kind](tmp_path)
    if kind in TABLES:
        assert TABLES[kind](tmp_path, found[3]) == ROLLOUTS
    if kind == "mlflow":  # it takes fewer characters in a name than others
        found[1]["rollout/reward/a b@c"] = found[1].pop("rollout/reward/a b_c")
    for name, value in HISTOGRAMS.get(kind, {}).items():
        assert found[3].pop(name) == value
    assert found == expected(STEPS)


def prometheus_rows(text: str) -> Rows:
    from prometheus_client.parser import text_string_to_metric_families

    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    (step,) = [int(sample.value) for sample in samples if sample.name == "ratchet_step"]
    return {
        step: {
            sample.labels["name"]: sample.value
            for sample in samples
            if sample.name == "ratchet_metric"
        }
    }


@pytest.mark.needs("prometheus_client")
def test_prometheus_scrapes_the_latest_step(tmp_path: Path, free_port: int) -> None:
    sink = PrometheusSink(
        PrometheusConfig(port=free_port, textfile=str(tmp_path / "ratchet.prom")), tracked(tmp_path)
    )
    try:
        for step, metrics in enumerate(STEPS, 1):
            sink.write(step, metrics)
            scraped = (
                urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=10)
                .read()
                .decode()
            )
            for text in (scraped, (tmp_path / "ratchet.prom").read_text()):
                # nothing of the step before
                assert prometheus_rows(text) == {step: select_finite(metrics)}
    finally:
        sink.close()


@pytest.mark.fault("S15")
@pytest.mark.needs("prometheus_client")
def test_no_scrape_and_no_name_breaks_prometheus(
    tmp_path: Path, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A request without a key must not be able to fill the log, and data name some metrics."""
    run = replace(tracked(tmp_path), name='r"\n\udcff')
    sink = PrometheusSink(PrometheusConfig(port=free_port), run)
    try:
        sink.write(1, {"half/\ud800": 1.0, 'a"}\nratchet_metric 5\n\0': 2.0, "a": 3.0})
        requests = [
            b"GET / HTTP/1.1\r\naccept: \xff\xfe;=;;",
            b"GET / HTTP/1.1\r\naccept: application/openmetrics-text;version=x",
            b"GET /%ff?name[]=%ff HTTP/1.1\r\naccept-encoding: \xff;q=x",
            b"POST / HTTP/1.1\r\ncontent-length: 0",
        ]
        answers = [asked(free_port, request) for request in requests]
    finally:
        sink.close()
    assert [answer.split()[1] for answer in answers] == [b"200"] * 3 + [b"405"]
    page = answers[0].partition(b"\r\n\r\n")[2].decode()
    names = {"half/\\ud800": 1.0, 'a"}\nratchet_metric 5\n\0': 2.0, "a": 3.0}
    assert prometheus_rows(page) == {1: names}
    assert not caplog.records


def asked(port: int, head: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head + b"\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return connection.makefile("rb").read()


# --- in a run

RECIPE = """
name: tracked
threads: 1
model: {preset: tiny, overrides: {hidden_size: 32, n_layers: 1}}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 2}
evaluation: {tasks: 2}
algorithm: {kind: sft}
steps: 3
batch_size: 2
checkpoint: {every: 1}
logging: {progress: "off", sinks: [{kind: mlflow}, {kind: prometheus, port: null, textfile: FILE}]}
"""


@pytest.mark.needs("mlflow", "prometheus_client")
def test_a_run_and_its_resumption_are_one_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.replace("FILE", str(tmp_path / "ratchet.prom")))
    monkeypatch.setattr("ratchet.training.session.train", failing_after(2))
    with pytest.raises(KeyboardInterrupt):
        start_run(recipe, [], path, command="train")
    monkeypatch.undo()
    assert resume_run(path, command="resume") == 0
    lines = {int(row.pop("step")): select_finite(row) for row in read_jsonl(path / "metrics.jsonl")}
    assert mlflow_rows(path) == lines
    last = max(lines)
    assert prometheus_rows((tmp_path / "ratchet.prom").read_text()) == {last: lines[last]}
    params = mlflow_params(path)
    assert params["stages.0.optimizer.lr"] == "1e-05"
    assert params["seed"] == "0"


def failing_after(steps: int) -> Any:
    from ratchet.training import loop

    async def broken(run: Any) -> None:
        after = run.after

        async def counted(step: int, groups: Any, batch: Any) -> None:
            await after(step, groups, batch)
            if step + 1 == steps:
                raise KeyboardInterrupt

        run.after = counted
        await loop.train(run)

    return broken


def mlflow_params(path: Path) -> dict[str, str]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{path / 'mlflow.db'}")
    (run,) = client.search_runs(["1"])
    return run.data.params


@pytest.mark.parametrize(
    ("section", "mode", "project"),
    [
        (WandbConfig(), "offline", "theirs"),
        (WandbConfig(mode="online", project="mine"), "online", "mine"),
    ],
)
def test_wandbs_own_variables_hold_where_the_recipe_says_nothing(
    section: WandbConfig,
    mode: str,
    project: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = MagicMock()
    package.setup().settings = SimpleNamespace(mode="offline", project="theirs")
    monkeypatch.setitem(sys.modules, "wandb", package)
    build(section, tracked(tmp_path))
    options = package.init.call_args.kwargs
    assert (options["mode"], options["project"]) == (mode, project)


# --- what goes wrong


def test_a_service_that_fails_at_the_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def construct(section: object, run: TrackedRun) -> None:
        raise OSError("wandb: CommError: no route")

    monkeypatch.setattr("ratchet.observe.trackers.build", construct)
    with pytest.raises(
        ConfigError,
        match=r"logging\.sinks: wandb: CommError: no route; remove this sink, or set its mode to offline",
    ):
        build_trackers([WandbConfig()], tracked(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert build_trackers([WandbConfig()], tracked(tmp_path, is_resumed=True)) == []
    assert "no route" in caplog.text


@pytest.mark.parametrize(
    "section", [WandbConfig(), MlflowConfig(), SwanlabConfig(), TrackioConfig(), PrometheusConfig()]
)
def test_a_package_that_is_missing_says_how_to_get_it(
    section: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow", "swanlab", "trackio", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'ratchet-rl\[trackers\]'"):
        build_trackers([section], tracked(tmp_path))


SECTIONS = [
    (
        WandbConfig(project="p", entity="e", mode="offline"),
        {"project": "p", "entity": "e", "mode": "offline", "resume": None},
    ),
    (WandbConfig(), {"project": "ratchet", "entity": None, "mode": "online", "resume": "allow"}),
    (
        SwanlabConfig(project="p", workspace="w"),
        {"project": "p", "workspace": "w", "mode": "online", "id": "one", "resume": "allow"},
    ),
    (SwanlabConfig(mode="offline"), {"mode": "offline", "id": None, "resume": None}),
    (
        TrackioConfig(project="p", space="me/runs"),
        {"project": "p", "space_id": "me/runs", "resume": "allow"},
    ),
]


@pytest.mark.parametrize(("section", "asked"), SECTIONS)
def test_what_a_service_is_asked_for(
    section: Any, asked: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    service = MagicMock()
    service.setup().settings = SimpleNamespace(mode="online", project=None)
    monkeypatch.setitem(sys.modules, section.kind, service)
    build_trackers([section], TrackedRun("quick", "one", tmp_path, {"seed": 0}, is_resumed=True))
    given = service.init.call_args.kwargs
    assert given.items() >= {**asked, "config": {"seed": 0}}.items()


def test_settings_are_told_by_their_leaves() -> None:
    assert dict(flatten_settings({"a": {"b": [1, {"c": None}]}, "d": "x"})) == {
        "a.b.0": 1,
        "a.b.1.c": None,
        "d": "x",
    }


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert get_run_id(tmp_path) == get_run_id(tmp_path) != get_run_id(tmp_path / "a")


def test_numbers_that_are_not_finite_are_left_out() -> None:
    assert select_finite({"a": None, "b": math.pi}) == {"b": math.pi}
