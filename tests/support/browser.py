"""A real browser, for tests of pages.

    from tests.support.browser import opened, start_browser

    pytestmark = pytest.mark.cluster

    def test_a_page_has_a_heading(browser, path):
        with opened(browser, path) as page:
            assert page.get_by_role("heading", level=1).count() == 1

The fixture `browser` is of a module: it starts before a test's own fixtures, so that its processes
are none that the test leaves behind, and it ends with the module, as event loops of other tests do
not run beside playwright's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="pages are tested with playwright: pip install playwright"
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    # Nothing that a browser does by itself.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # All files in one process: it compiles plotly.js once, not for every test.
    "--process-per-site",
    # No process in advance for a page that may come: it would be left behind.
    "--disable-features=SpareRendererForSitePerProcess",
]
LOCAL = ("file:", "data:", "blob:")
WARNINGS = ("error", "warning")


def find_chromium(bundled: str) -> str:
    """The program to start: one of the system, or the one that playwright brought."""
    for found in (*map(shutil.which, PROGRAMS), bundled):
        if found and Path(found).exists():
            return found
    pytest.skip(f"pages are tested in a browser, and there is none of {', '.join(PROGRAMS)}")


@pytest.fixture(scope="module", name="browser")
def start_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One headless Chromium for all tests of a module, without a network."""
    empty = tmp_path_factory.mktemp("browser") / "empty.html"
    empty.write_text("<!doctype html><title>Empty</title>")
    with playwright.sync_playwright() as started:
        program = find_chromium(started.chromium.executable_path)
        chromium = started.chromium.launch(executable_path=program, args=ARGUMENTS)
        permissions = ["clipboard-read", "clipboard-write"]
        context = chromium.new_context(offline=True, permissions=permissions)
        # A window that stays open, and with it the process of the windows of the tests.
        context.new_page().goto(empty.as_uri())
        yield chromium
        chromium.close()


@contextmanager
def opened(
    browser: Browser,
    path: Path,
    width: int = 1400,
    height: int = 900,
    scheme: Literal["light", "dark"] = "light",
) -> Iterator[Page]:
    """A file in a window of its own. At the end it has reported no error, and has asked for
    nothing but itself.
    """
    complaints: list[str] = []
    asked: list[str] = []
    page = browser.contexts[0].new_page()
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))

    @partial(page.on, "console")
    def listen(message: ConsoleMessage) -> None:
        if message.type in WARNINGS:
            complaints.append(message.text)

    try:
        page.goto(path.as_uri())
        yield page
    finally:
        page.close()
    assert not complaints
    assert not [url for url in asked if not url.startswith(LOCAL)]
