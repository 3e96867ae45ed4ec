"""The page: styles, scripts and the charting library in one HTML file, with or without runs in it.

Nothing that comes from a run is ever part of the HTML: it is compressed and written in base64,
which has no character that means anything there, and the scripts insert texts as texts. The content
security policy allows those scripts alone, by their hashes, so that markup which got in after all
would do nothing.
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

from ratchet.commands.report.media import collect_names
from ratchet.commands.report.runs import RunReader
from ratchet.commands.report.schema import pack
from ratchet.types import MediaKind

STYLES = ("vendor/uPlot.min.css", "style.css", "rollouts.css")
# In this order: each uses what those before it define.
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "dom.js",
    "wire.js",
    "format.js",
    "run.js",
    "source.js",
    "chart.js",
    "curves.js",
    "tokens.js",
    "conversation.js",
    "browser.js",
    "waterfall.js",
    "timeline.js",
    "differences.js",
    "app.js",
)
MOST_MEDIA = 2**24  # characters of a run's images and other media in a file
MOST_ROWS = 2**18  # of a run's table in a file; of longer ones every n-th step is there


def asset(name: str) -> str:
    return files("ratchet.commands.report").joinpath("assets", name).read_text(encoding="utf-8")


def live_page() -> str:
    """Return the page that requests its runs from this machine."""
    return _page("Ratchet", [], connect="'self'")


def report_page(runs: Sequence[RunReader], *, rollouts: int, tokens: int) -> str:
    """Return a page that holds its runs: all metrics, the table of all rollouts, and of each run at
    most `rollouts` rollouts with their texts, of at most `tokens` tokens together.

    Raises DataError, RunDirectoryError.
    """
    blobs: list[tuple[str, bytes]] = []
    for index, run in enumerate(runs):
        rows = sum(facts.rows for facts in run.rollouts.record.steps.values())
        every = -(-rows // MOST_ROWS) if rows else 1
        sample = run.rollouts.sample(rollouts, tokens)
        columns, _ = run.metrics.part(most_cells=None)
        blobs.append((f"run-{index}", pack({**run.facts(), "rows": rows, "every": every}, columns)))
        blobs.append((f"rollouts-{index}", run.rollouts.columns(every=every)))
        blobs.append((f"sample-{index}", json.dumps(sample, allow_nan=False).encode()))
        blobs.append((f"media-{index}", json.dumps(_media(run, sample)).encode()))
    return _page(" · ".join(run.name for run in runs), blobs, connect="'none'")


def _media(run: RunReader, sample: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the media of the rollouts that have their texts in the file, each once, as long as
    there is room."""
    urls: dict[str, str] = {}
    for detail in sample:
        new: dict[str, MediaKind] = {
            name: kind for name, kind in collect_names([detail]).items() if name not in urls
        }
        urls |= run.rollouts.media(detail["facts"]["step"], new) if new else {}
        if sum(map(len, urls.values())) > MOST_MEDIA:
            break
    return urls


def _page(title: str, blobs: Sequence[tuple[str, bytes]], *, connect: str) -> str:
    scripts = [asset(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src {connect}"
    )
    policy += "; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    values = {
        "policy": policy,
        "title": html.escape(title),
        "styles": "\n".join(f"<style>\n{asset(name)}</style>" for name in STYLES),
        "data": "\n".join(_blob(name, content) for name, content in blobs),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    page = asset("page.html")
    for name, value in values.items():
        page = page.replace(f"<!--{name}-->", value, 1)
    return page


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _blob(name: str, content: bytes) -> str:
    """Return an element that no browser runs or shows. mtime: two reports of the same runs are the
    same file."""
    packed = base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{packed}</script>'
