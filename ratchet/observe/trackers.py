"""Experiment trackers as sinks. Each imports its package when it is built.

Metrics that are not finite are left out, because trackers do not distinguish them from missing
ones. A resumed run continues in the same run of the tracker; steps that were lost in a crash are
written again, with the same numbers.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from ratchet.config.base import Section
from ratchet.config.resolve import build
from ratchet.errors import ConfigError, suggest_install
from ratchet.observe.config import (
    MlflowConfig,
    PrometheusConfig,
    SwanlabConfig,
    TrackioConfig,
    WandbConfig,
)
from ratchet.observe.rollout_table import RolloutTable
from ratchet.observe.sinks import Metrics, Sink, get_groups, get_histograms
from ratchet.observe.write_files import replace_text
from ratchet.utils.terminal_text import escape_surrogates

log = logging.getLogger(__name__)

# The content type of the text format that every version of Prometheus reads.
EXPOSITION_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run that a tracker shows.

    id: unique to the run, and the same after a resume.
    settings: the run's recipe.
    """

    name: str
    id: str
    directory: Path
    settings: Mapping[str, Any]
    is_resumed: bool = False


def import_package(name: str, extra: str = "trackers") -> Any:
    """Import and return a tracker's package. Raises ConfigError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"logging.sinks needs {name}, which is not installed: {suggest_install(extra)}"
        ) from error


@contextmanager
def as_os_error(name: str) -> Iterator[None]:
    """Convert all errors of a service to OSError, the error of a sink, so that none ends the run.

    A service's errors have no common class.
    """
    try:
        yield
    except Exception as error:
        raise OSError(f"{name}: {type(error).__name__}: {error}") from error


def select_finite(metrics: Metrics) -> dict[str, float]:
    """Return the finite metrics, under names that every tracker can encode.

    Names can come from data, and so contain lone surrogates.
    """
    return {escape_surrogates(name): value for name, value in metrics.items() if value is not None}


def flatten_settings(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested settings, named like "stages.0.optimizer.lr"."""
    if isinstance(settings, Mapping):
        children = [(str(key), value) for key, value in settings.items()]
    elif isinstance(settings, list | tuple):
        children = [(str(index), value) for index, value in enumerate(settings)]
    else:
        yield name, settings
        return
    for key, value in children:
        yield from flatten_settings(value, f"{name}.{key}" if name else key)


class RunSink:
    """A sink for trackers whose run has `log(metrics, step=)` and `finish()`, like W&B's.

    Args:
        begin: Starts the run.
        histogram: The tracker's class for histograms, called with `np_histogram=(counts, edges)`;
            None if it has none.
        rollouts: The tables of attempts; None if the tracker has none.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[], Any],
        *,
        histogram: Callable[..., Any] | None = None,
        rollouts: RolloutTable | None = None,
    ) -> None:
        self._name = name
        self._histogram = histogram
        self._rollouts = rollouts
        with as_os_error(name):
            self._run = begin()

    def write(self, step: int, metrics: Metrics) -> None:
        with as_os_error(self._name):
            values: dict[str, Any] = select_finite(metrics)
            if self._histogram is not None:
                for name, histogram in get_histograms(metrics).items():
                    values[name] = self._histogram(
                        np_histogram=(np.array(histogram.counts), np.array(histogram.edges))
                    )
            if self._rollouts is not None:
                table = self._rollouts.build(step, get_groups(metrics))
                if table is not None:
                    values["rollouts"] = table
            self._run.log(values, step=step)

    def close(self) -> None:
        with as_os_error(self._name):
            self._run.finish()


class WandbSink(RunSink):
    """A sink for Weights & Biases.

    W&B's console capture is off, because it conflicts with the progress display. W&B's environment
    variables (WANDB_MODE, WANDB_ENTITY, WANDB_TAGS, ...) apply to settings that the recipe leaves
    out.
    """

    def __init__(self, config: WandbConfig, run: TrackedRun) -> None:
        wandb = import_package("wandb")

        def begin() -> Any:
            defaults = wandb.setup().settings  # from the environment and W&B's files
            mode = config.mode or defaults.mode
            return wandb.init(
                project=config.project or defaults.project or "ratchet",
                entity=config.entity,
                name=run.name,
                id=run.id,
                dir=str(run.directory),
                mode=mode,
                resume="allow" if run.is_resumed and mode == "online" else None,
                config=dict(run.settings),
                settings=wandb.Settings(console="off", silent=True),
            )

        super().__init__(
            "wandb",
            begin,
            histogram=wandb.Histogram,
            rollouts=RolloutTable(wandb.Table, config.rollouts, config.rollouts_every),
        )


class SwanlabSink(RunSink):
    """A sink for SwanLab.

    SwanLab resumes only runs on its server: offline, a resumed run writes a second log.
    """

    def __init__(self, config: SwanlabConfig, run: TrackedRun) -> None:
        swanlab = import_package("swanlab")
        online = config.mode == "online"

        def begin() -> Any:
            return swanlab.init(
                project=config.project,
                workspace=config.workspace,
                name=run.name,
                id=run.id if online else None,
                resume="allow" if online else None,
                log_dir=str(run.directory / "swanlog"),
                mode=config.mode,
                config=dict(run.settings),
            )

        super().__init__("swanlab", begin)


class TrackioSink(RunSink):
    def __init__(self, config: TrackioConfig, run: TrackedRun) -> None:
        trackio = import_package("trackio")

        def begin() -> Any:
            return trackio.init(
                project=config.project,
                name=f"{run.name}-{run.id}",
                space_id=config.space,
                resume="allow",
                config=dict(run.settings),
                embed=False,
            )

        super().__init__(
            "trackio",
            begin,
            histogram=trackio.Histogram,
            rollouts=RolloutTable(trackio.Table, config.rollouts, config.rollouts_every),
        )


class MlflowSink:
    TAG = "ratchet.training.run"

    def __init__(self, config: MlflowConfig, run: TrackedRun) -> None:
        mlflow = import_package("mlflow")
        entities = import_package("mlflow.entities")
        self._metric, self._param = entities.Metric, entities.Param
        uri = config.tracking_uri or f"sqlite:///{(run.directory / 'mlflow.db').absolute()}"
        with as_os_error("mlflow"):
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            known_experiment = self._client.get_experiment_by_name(config.experiment)
            experiment = (
                known_experiment.experiment_id
                if known_experiment
                else self._client.create_experiment(config.experiment)
            )
            earlier_runs = self._client.search_runs(
                [experiment], f"tags.`{self.TAG}` = '{run.id}'", max_results=1
            )
            if earlier_runs:
                self._id = earlier_runs[0].info.run_id
                self._client.update_run(self._id, status="RUNNING")
            else:
                created = self._client.create_run(
                    experiment, run_name=run.name, tags={self.TAG: run.id}
                )
                self._id = created.info.run_id
                self._send_settings(run.settings)

    def _send_settings(self, settings: Mapping[str, Any]) -> None:
        """Send the settings in batches of 100, the most that a server accepts in a call."""
        params = [
            self._param(_replace_forbidden(name), str(value)[:6000])
            for name, value in flatten_settings(settings)
        ]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[start : start + 100])

    def write(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        with as_os_error("mlflow"):
            values = [
                self._metric(_replace_forbidden(name), value, now, step)
                for name, value in select_finite(metrics).items()
            ]
            for start in range(0, len(values), 1000):  # a server accepts 1,000 in a call
                self._client.log_batch(self._id, metrics=values[start : start + 1000])

    def close(self) -> None:
        with as_os_error("mlflow"):
            self._client.set_terminated(self._id)


def _replace_forbidden(name: str) -> str:
    return re.sub(r"[^\w.\- :/]", "_", name)


class PrometheusSink:
    def __init__(self, config: PrometheusConfig, run: TrackedRun) -> None:
        self._prometheus = import_package("prometheus_client")
        self._registry = self._prometheus.CollectorRegistry()
        self._run_name = escape_surrogates(run.name)
        self._textfile = config.textfile
        self._server = None
        self._step = self._prometheus.Gauge(
            "ratchet_step", "Steps done", ["run"], registry=self._registry
        ).labels(self._run_name)
        self._metric = self._prometheus.Gauge(
            "ratchet_metric", "The latest step's value", ["run", "name"], registry=self._registry
        )
        self._page = self._prometheus.generate_latest(self._registry)
        if config.port is not None:
            self._server = self._serve(config.address, config.port)

    def _serve(self, address: str, port: int) -> Any:
        """Start the server of the metrics. Raises OSError if it can't listen on the address."""
        from ratchet.web.connection import ServerLimits
        from ratchet.web.guard import LOOPBACK, Guard
        from ratchet.web.server import ServerThread

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        names = (*LOOPBACK, address) if address in LOOPBACK else None
        listener = socket.create_server((address, port), family=family)
        limits = ServerLimits(connections=16, grace_s=1.0)
        return ServerThread(Guard(self._answer, hosts=names), listener, limits=limits)

    async def _answer(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Answer every path with the page of metrics.

        The page is built once a step, not once a scrape, so that requests are cheap and no scrape
        sees a half-updated step.
        """
        is_read = scope["method"] in ("GET", "HEAD")
        content_type = EXPOSITION_CONTENT_TYPE if is_read else "text/plain; charset=utf-8"
        body = self._page if is_read else b"this server is read-only: use GET"
        headers = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body))]
        status = 200 if is_read else 405
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def write(self, step: int, metrics: Metrics) -> None:
        self._metric.clear()
        self._step.set(step)
        for name, value in select_finite(metrics).items():
            self._metric.labels(self._run_name, name).set(value)
        self._page = self._prometheus.generate_latest(self._registry)
        if self._textfile is not None:
            self._prometheus.write_to_textfile(self._textfile, self._registry)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def get_run_id(directory: Path) -> str:
    """Return the id of the run in this directory, creating it on the first call."""
    path = directory / ".run_id"
    if not path.exists():
        replace_text(path, uuid4().hex[:12])
    return path.read_text()


def build_trackers(sections: Sequence[Section], run: TrackedRun) -> list[Sink]:
    """Return a sink for each section.

    In a resumed run, a tracker that can't start is left out with a warning, because no service may
    stop a run. In a new run, ConfigError is raised, so that the user can fix the tracker at once.
    """
    sinks: list[Sink] = []
    for section in sections:
        try:
            sinks.append(build(section, run))
        except OSError as error:
            if not run.is_resumed:
                raise ConfigError(
                    f"logging.sinks: {error}; remove this sink, or set its mode to offline if it "
                    "has a mode"
                ) from error
            log.warning("a tracker can't start, and gets no metrics of this run: %s", error)
    return sinks
