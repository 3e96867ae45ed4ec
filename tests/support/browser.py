"""Chromium, for the tests of pages."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest


# Not of the session: while it is open, its thread has a running event loop.
@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # which Chromium's sandbox refuses
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=arguments
        )
        yield browser
        browser.close()


def collect_complaints(page: Any, complaints: list[str]) -> None:
    """Append the errors and warnings on a page's console, and its uncaught errors, to a list."""
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
