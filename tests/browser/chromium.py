"""A Chromium for the browser tests: found on this machine, or installed. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome")
HINT = (
    "no Chromium starts on this machine and none could be installed; install one so that `chromium` "
    "is on the PATH (Debian and Ubuntu: apt-get install chromium), or run: playwright install chromium"
)


def find() -> str | None:
    """The path of a Chromium that starts, the system's first, then Playwright's own."""
    candidates = [path for name in NAMES if (path := shutil.which(name))]
    return next(filter(_starts, candidates), None) or _of_playwright()


def find_or_install() -> str | None:
    """The path of a Chromium, installed if need be: by apt where that is allowed, else by Playwright."""
    if path := find():
        return path
    for commands in _installers():
        for command in commands:
            subprocess.run(command, check=False)
        if path := find():
            return path
    return None


def _installers() -> list[list[list[str]]]:
    """Ways to install a Chromium, each a list of commands, the best first."""
    apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]
    ways = [[[sys.executable, "-m", "playwright", "install", "chromium"]]]
    if shutil.which("apt-get") and os.geteuid() == 0:
        ways.insert(0, [[*apt, "update"], [*apt, "install", "-y", "--no-install-recommends", "chromium"]])
    return ways


def _starts(path: str) -> bool:
    """Whether the program at this path runs; Ubuntu's `chromium-browser` may be a stub that does not."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _of_playwright() -> str | None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if os.path.exists(path) and _starts(path) else None
