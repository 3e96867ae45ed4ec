"""Reports of runs: `ratchet report` as one HTML file, `ratchet ui` as a live page of this
machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratchet.commands.report.page import report_page
from ratchet.commands.report.runs import named
from ratchet.errors import RunDirectoryError
from ratchet.observe.write_files import replace_text
from ratchet.runs.resolve import fetch_run_record
from ratchet.utils.object_store import is_address

FILE = "report.html"
MOST_TOKENS = 2**18  # of a run, that have their numbers in the file: some megabytes


def write_report(places: Sequence[str | Path], out: Path | None = None, *, rollouts: int) -> Path:
    """Write the runs as one HTML file, and return its path: by default in the first run, or here if
    that has an address.

    rollouts: how many of each run have their texts in the file. Raises RunDirectoryError for what
    is no run, or if the file can't be written; DataError for a record that can't be read.
    """
    paths = [fetch_run_record(place) for place in places]
    page = report_page(named(paths), rollouts=rollouts, tokens=MOST_TOKENS)
    out = out or (Path(FILE) if is_address(places[0]) else paths[0] / FILE)
    try:
        replace_text(out, page)
    except OSError as error:
        raise RunDirectoryError(f"{out} can't be written: {error}; choose another --out") from error
    return out
