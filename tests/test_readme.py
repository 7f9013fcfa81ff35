"""The README holds: its Python runs, and its commands print what it shows, their figures aside.

`python -m tests.test_readme` runs the commands again and puts what they print into the README.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from pathlib import Path

import pytest

from psm_core import demo
from psm_core.cli import main

FILE = Path(__file__).resolve().parents[1] / "README.md"
README = FILE.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shape_of(text: str) -> list[str]:
    """The words of a text, every number replaced by #."""
    return re.sub(r"\d[\d,.]*(e[-+]?\d+)?", "#", text).split()


def printed(line: str) -> str:
    """What the command of a line prints."""
    prompt, python, _, package, *arguments = shlex.split(line)
    assert (prompt, python, package) == ("$", "python", "psm_core")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(arguments) == 0
    return out.getvalue()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_its_commands_print_what_it_shows() -> None:
    shown = [block.split("\n", 1) for block in blocks("console")]
    assert [line.split()[4] for line, _ in shown] == [
        "layers", "fit", "sweep", "compress", "evaluate", "verify"
    ]  # fmt: skip
    for line, expected in shown:
        assert shape_of(printed(line)) == shape_of(expected), line


def test_its_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    error, parameters, nbytes = map(float, capsys.readouterr().out.splitlines()[3].split())
    assert 0 < error < 1
    assert parameters <= 0.1 * 512 * 512 < nbytes < 0.2 * 4 * 512 * 512


@pytest.mark.parametrize("name", demo.NETWORKS)
def test_its_networks_are_those_shipped(name: str) -> None:
    network = demo.NETWORKS[name]
    parameters = sum(p.numel() for p in network.build().parameters())
    assert f"`demo:{name}` ({parameters:,} parameters, {network.test_accuracy:.2%}" in README


def refresh() -> None:
    """Put what the commands print now into the README."""
    text = README
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in blocks("console"):
            line = block.split("\n", 1)[0]
            text = text.replace(block, f"{line}\n{printed(line).rstrip()}\n")
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    refresh()
