"""The dashboard as a user runs it, and a real browser in front of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.browser import chromium

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass(frozen=True)
class App:
    """A running dashboard: its address and the folder of its results."""

    url: str
    cache: Path


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """`streamlit run app.py` on a free port, with a cache of its own."""
    folder = tmp_path_factory.mktemp("app")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", "app.py"]
    options = [f"--server.port={port}", "--server.address=127.0.0.1", "--server.headless=true"]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            env={**os.environ, "PSM_CACHE": str(folder / "cache")},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(url, process, folder / "log.txt")
        yield App(url, folder / "cache")
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its worker too
        process.wait()


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the app does not start: {log.read_text()}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium with a fresh profile."""
    path = chromium.find()
    assert path, chromium.HINT
    expect.set_options(timeout=1000 * SECONDS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, app: App) -> Iterator[Page]:
    """A tab of its own; the test fails if the page threw, logged an error, or asked another host."""
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    context.set_default_timeout(1000 * SECONDS)
    tab = context.new_page()
    problems: list[str] = []

    def note_message(message: ConsoleMessage) -> None:
        # Opened by a deep link, Streamlit first looks for its server below the page's own path.
        is_probe = "/_stcore/" in message.location["url"]
        if message.type == "error" and not is_probe:
            problems.append(f"console: {message.text}")

    def note_request(request: Request) -> None:
        if not request.url.startswith((app.url, "data:", "blob:")):
            problems.append(f"asked another host: {request.url}")

    tab.on("console", note_message)
    tab.on("pageerror", lambda error: problems.append(f"thrown: {error}"))
    tab.on("request", note_request)
    yield tab
    context.close()
    assert not problems
