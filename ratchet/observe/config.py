"""Configuration of the trackers. This module imports neither torch nor the trackers' packages."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ratchet.config.base import Section


class TableConfig(Section):
    """The base class of trackers that show attempts in a table."""

    rollouts: int = Field(0, ge=0)
    """Attempts in a table of the step's prompts, responses and rewards; 0: no tables, and no text
    leaves this machine."""
    rollouts_every: int = Field(10, ge=1)
    """Steps between tables of attempts."""


class WandbConfig(TableConfig):
    """The Weights & Biases tracker."""

    builds: ClassVar[str] = "ratchet.observe.trackers:WandbSink"

    kind: Literal["wandb"] = "wandb"
    project: str | None = None
    """Project in which the run appears; null: WANDB_PROJECT, or ratchet."""
    entity: str | None = None
    """Team or user; null: WANDB_ENTITY, or the logged-in user."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """offline: kept in the run's wandb/, for `wandb sync`; null: WANDB_MODE, or online."""


class MlflowConfig(Section):
    """The MLflow tracker."""

    builds: ClassVar[str] = "ratchet.observe.trackers:MlflowSink"

    kind: Literal["mlflow"] = "mlflow"
    experiment: str = "ratchet"
    """Experiment in which the run appears."""
    tracking_uri: str | None = None
    """Address of a server or a store; null: the run's mlflow.db (SQLite)."""


class SwanlabConfig(Section):
    """The SwanLab tracker."""

    builds: ClassVar[str] = "ratchet.observe.trackers:SwanlabSink"

    kind: Literal["swanlab"] = "swanlab"
    project: str = "ratchet"
    """Project in which the run appears."""
    workspace: str | None = None
    """Organisation or user; null: the logged-in user."""
    mode: Literal["online", "offline"] = "online"
    """offline: kept in the run's swanlog/, for `swanlab sync`."""


class TrackioConfig(TableConfig):
    """The Trackio tracker; it writes to its local directory (TRACKIO_DIR), or to a Space."""

    builds: ClassVar[str] = "ratchet.observe.trackers:TrackioSink"

    kind: Literal["trackio"] = "trackio"
    project: str = "ratchet"
    """Project in which the run appears."""
    space: str | None = None
    """Hugging Face Space that shows the run; null: none, `trackio show` on this machine shows
    it."""


class PrometheusConfig(Section):
    """The Prometheus exporter of the latest step's metrics.

    A metric is `ratchet_metric{run="...", name="rollout/reward"}`, the step is `ratchet_step`.
    """

    builds: ClassVar[str] = "ratchet.observe.trackers:PrometheusSink"

    kind: Literal["prometheus"] = "prometheus"
    port: int | None = Field(9464, ge=1, lt=65536)
    """Port of this machine that Prometheus scrapes; null: none."""
    address: str = "127.0.0.1"
    """Address that the exporter listens on; 0.0.0.0: all addresses of this machine."""
    textfile: str | None = None
    """A .prom file for the node exporter's textfile collector; null: none."""


class OpenTelemetryConfig(Section):
    """Spans of the run's steps, attempts, requests and rewards, sent by OTLP over HTTP.

    OpenTelemetry's environment variables, such as OTEL_EXPORTER_OTLP_HEADERS for a key, apply to
    settings that the recipe leaves out.
    """

    builds: ClassVar[str] = "ratchet.observe.tracing.opentelemetry_sink:OpenTelemetrySink"

    kind: Literal["opentelemetry"] = "opentelemetry"
    endpoint: str | None = Field(None, pattern="^https?://")
    """Address of a collector, such as http://host:4318; null: OTEL_EXPORTER_OTLP_ENDPOINT, or
    http://localhost:4318."""
    attempts: int = Field(64, ge=0)
    """Maximum number of attempts of each phase that are traced, with their requests and rewards."""
