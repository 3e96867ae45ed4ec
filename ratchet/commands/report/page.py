"""Build the report page: one HTML file with styles, scripts, the charting library and data of runs.

A live page contains no data. Data of a run can't inject HTML: it is gzipped and base64-encoded, and
the scripts insert it as text. As a second defence, the content security policy allows only the
page's own scripts, by hash.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from ratchet.commands.report.answers import sample_answers
from ratchet.commands.report.files import read_files
from ratchet.commands.report.media import collect_names
from ratchet.commands.report.runs import RunReader
from ratchet.commands.report.wire_format import pack
from ratchet.types import MediaKind

STYLES = ("vendor/uPlot.min.css", "style.css", "rollouts.css")
# The scripts in load order: each may use definitions of earlier ones.
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "dom.js",
    "wire.js",
    "format.js",
    "run.js",
    "source.js",
    "chart.js",
    "stages.js",
    "runs.js",
    "curves.js",
    "tokens.js",
    "conversation.js",
    "browser.js",
    "answers.js",
    "recipe.js",
    "waterfall.js",
    "timeline.js",
    "differences.js",
    "app.js",
)
# Maximum characters of a run's media in a report. The media of the last rollout may exceed it.
MAX_MEDIA_CHARS = 2**24
# Maximum rows of a run's rollout table in a report. A longer table is thinned to every n-th step.
MAX_ROWS = 2**18


def read_asset(name: str) -> str:
    return files("ratchet.commands.report").joinpath("assets", name).read_text(encoding="utf-8")


def make_live_page() -> str:
    """Return the page that fetches its runs from the server that sent it."""
    return _fill_page("Ratchet", [], connect="'self'")


def make_report_page(runs: Sequence[RunReader], *, rollouts: int, max_tokens: int) -> str:
    """Return a page that contains the runs: all metrics, rollout tables and some rollouts' texts.

    Args:
        runs: The runs.
        rollouts: Maximum number of rollouts of each run whose texts are included; also the maximum
            number of held-out tasks whose answers are included.
        max_tokens: Maximum number of tokens of these rollouts of a run together.

    Raises DataError, RunDirectoryError.
    """
    blobs: list[tuple[str, bytes]] = []
    for index, run in enumerate(runs):
        rows = sum(facts.rows for facts in run.rollouts.record.steps.values())
        every = -(-rows // MAX_ROWS) if rows else 1
        sample = run.rollouts.sample(rollouts, max_tokens)
        columns, _ = run.metrics.read_part(max_cells=None)
        blobs.append(
            (f"run-{index}", pack({**run.read_facts(), "rows": rows, "every": every}, columns))
        )
        blobs.append((f"rollouts-{index}", run.rollouts.pack_columns(every=every)))
        blobs.append((f"sample-{index}", json.dumps(sample, allow_nan=False).encode()))
        blobs.append((f"files-{index}", json.dumps(read_files(run.directory)).encode()))
        blobs.append(
            (f"answers-{index}", json.dumps(sample_answers(run.directory, rollouts)).encode())
        )
        blobs.append((f"media-{index}", json.dumps(_embed_media(run, sample)).encode()))
    return _fill_page(" · ".join(run.name for run in runs), blobs, connect="'none'")


def _embed_media(run: RunReader, sample: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the `data:` URLs of the sampled rollouts' media, by name.

    Once the URLs are longer than MAX_MEDIA_CHARS, the media of further rollouts are left out.
    """
    urls: dict[str, str] = {}
    for detail in sample:
        new_kind_by_name: dict[str, MediaKind] = {
            name: kind for name, kind in collect_names([detail]).items() if name not in urls
        }
        urls |= (
            run.rollouts.make_media_urls(detail["facts"]["step"], new_kind_by_name)
            if new_kind_by_name
            else {}
        )
        if sum(map(len, urls.values())) > MAX_MEDIA_CHARS:
            break
    return urls


def _fill_page(title: str, blobs: Sequence[tuple[str, bytes]], *, connect: str) -> str:
    scripts = [read_asset(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src {connect}"
    )
    policy += "; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    values = {
        "policy": policy,
        "title": html.escape(title),
        "styles": "\n".join(f"<style>\n{read_asset(name)}</style>" for name in STYLES),
        "data": "\n".join(_make_blob(name, content) for name, content in blobs),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    page = read_asset("page.html")
    for name, value in values.items():
        page = page.replace(f"<!--{name}-->", value, 1)
    return page


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _make_blob(name: str, content: bytes) -> str:
    """Return an HTML element with the compressed content. Browsers neither run nor show it."""
    # A fixed mtime makes two reports of the same runs the same file.
    packed = base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{packed}</script>'
