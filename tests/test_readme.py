"""The README holds: its Python runs, and its commands print what it shows, their figures aside."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from psm_core.cli import main

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shape_of(text: str) -> list[str]:
    """The words of a text, every number replaced by #."""
    return re.sub(r"\d[\d,.]*(e[-+]?\d+)?", "#", text).split()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_its_commands_print_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [block.split("\n", 1) for block in blocks("console")]
    assert [line.split()[4] for line, _ in shown] == [
        "layers", "fit", "sweep", "compress", "evaluate", "verify"
    ]  # fmt: skip
    for line, expected in shown:
        assert line.startswith("$ python -m psm_core ")
        assert main(shlex.split(line)[4:]) == 0
        assert shape_of(capsys.readouterr().out) == shape_of(expected), line


def test_its_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    error, parameters, nbytes = map(float, capsys.readouterr().out.splitlines()[3].split())
    assert 0 < error < 1
    assert parameters <= 0.1 * 512 * 512 < nbytes < 0.2 * 4 * 512 * 512
