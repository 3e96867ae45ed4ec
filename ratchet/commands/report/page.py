"""Build the report page: one HTML file with styles, scripts, the charting library and maybe runs.

Data of a run can't inject HTML: it is gzipped and base64-encoded, and the scripts insert it as
text. As a second defence, the content security policy allows only the page's own scripts, by hash.
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
# In load order: a script uses definitions of earlier ones.
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
MOST_MEDIA = 2**24  # characters of a run's media in a report; the last rollout's may exceed it
MOST_ROWS = 2**18  # of a run's rollout table in a report; a longer one has every n-th step


def asset(name: str) -> str:
    return files("ratchet.commands.report").joinpath("assets", name).read_text(encoding="utf-8")


def live_page() -> str:
    """Return the page that fetches its runs from the server that sent it."""
    return _page("Ratchet", [], connect="'self'")


def report_page(runs: Sequence[RunReader], *, rollouts: int, tokens: int) -> str:
    """Return a page that contains the runs: all metrics, rollout tables and some rollouts' texts.

    Args:
        rollouts: maximum number of rollouts of a run whose texts are included.
        tokens: maximum number of tokens in these texts together.

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
    """Return the `data:` URLs of the sampled rollouts' media, by name.

    It stops after the rollout with which they exceed `MOST_MEDIA`.
    """
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
    """Return an element with the compressed content, which browsers neither run nor show."""
    # A fixed mtime makes two reports of the same runs the same file.
    packed = base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{packed}</script>'
