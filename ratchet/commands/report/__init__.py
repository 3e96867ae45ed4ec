"""Show runs in the browser: `ratchet report` writes one HTML file, `ratchet ui` serves a live page
on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratchet.commands.report.page import make_report_page
from ratchet.commands.report.runs import open_runs
from ratchet.errors import RunDirectoryError
from ratchet.observe.write_files import replace_text
from ratchet.runs.resolve import fetch_run_record
from ratchet.utils.object_store import is_address
from ratchet.utils.safe_read import open_file

FILE = "report.html"
# Maximum number of tokens of a run whose log-probabilities and other numbers are in the file.
# Together they take some megabytes.
MAX_TOKENS = 2**18


def write_report(runs: Sequence[str | Path], out: Path | None = None, *, rollouts: int) -> Path:
    """Write the runs as one HTML file, and return its path.

    Args:
        runs: Run directories or addresses.
        out: The file. None: report.html in the first run, or in the working directory if the first
            run is at an address.
        rollouts: Number of rollouts of each run whose texts are in the file.

    Raises RunDirectoryError if one of `runs` holds no run, or the file can't be written or is no
    report; DataError for a record that can't be read.
    """
    paths = [fetch_run_record(run) for run in runs]
    page = make_report_page(open_runs(paths), rollouts=rollouts, max_tokens=MAX_TOKENS)
    out = out or (Path(FILE) if is_address(runs[0]) else paths[0] / FILE)
    if out.exists() and not out.is_file():
        # Writing replaces the path by a plain file, which would destroy a device such as /dev/null.
        raise RunDirectoryError(f"{out} is not a plain file; choose another --out")
    if out.exists() and out.stat().st_size and not _is_report(out, page):
        raise RunDirectoryError(
            f"{out} is not a report and is not overwritten; choose another --out"
        )
    try:
        replace_text(out.resolve() if out.is_symlink() else out, page)
    except OSError as error:
        raise RunDirectoryError(f"{out} can't be written: {error}; choose another --out") from error
    return out


def _is_report(path: Path, page: str) -> bool:
    """True if a file begins as the page of a report does, also as one of another version."""
    beginning = page.partition("script-src")[0].encode()
    try:
        with open_file(path) as file:
            return file.read(len(beginning)) == beginning
    except OSError as error:
        raise RunDirectoryError(f"{path} can't be read: {error}; choose another --out") from error
