"""The whole check: `python -m tests [PYTEST ARGUMENTS]`.

Makes sure that a browser is there, then runs the linter, the type checker and all tests.
Exit codes: 0 all is well; 1 something failed; 2 something is missing, with one line that says what.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.browser import chromium

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("streamlit", "torch", "playwright", "pytest", "ruff", "mypy")
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy", "psm_core"),
)


def main(arguments: list[str]) -> int:
    """Run everything, also after a failure, and return the exit code."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        install = f"{sys.executable} -m pip install -r requirements.txt -r tests/requirements.txt"
        print(f"error: not installed: {', '.join(missing)}; run: {install}", file=sys.stderr)
        return 2
    if chromium.find_or_install() is None:
        print(f"error: {chromium.HINT}", file=sys.stderr)
        return 2
    results = [run(*command) for command in (*CHECKS, ("pytest", *arguments))]
    print("\n".join(line for _, line in results))
    return 0 if all(passed for passed, _ in results) else 1


def run(*command: str) -> tuple[bool, str]:
    """Run a tool of this environment in the repository; whether it passed, and a line that says so."""
    words = " ".join(command)
    print(f"$ {words}", flush=True)
    start = time.monotonic()
    # Threads that wait asleep leave the cores to the app, its worker and the browser.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False, env=environment)
    passed = done.returncode == 0
    return passed, f"{'ok    ' if passed else 'FAILED'}  {words}  ({time.monotonic() - start:.0f} s)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
