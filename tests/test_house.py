"""The rules of the house, read from the sources themselves: imports, sizes, requirements."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("app.py", "pages", "psm_core", "tests")
SOURCES = sorted(
    path.relative_to(ROOT)
    for place in PLACES
    for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
)
LONGEST = 420

# What a place may not import at module level: everything that stands above it.
ABOVE = {
    "psm_core": ("app", "pages", "tests", "streamlit"),
    "psm_core/errors.py": ("psm_core", "torch"),
    "psm_core/sparse.py": ("psm_core.methods", "psm_core.network", "psm_core.experiments"),
    "psm_core/methods": ("psm_core.experiments", "psm_core.checkpoint", "psm_core.plots", "psm_core.cli"),
    "psm_core/factorization.py": ("psm_core.methods", "psm_core.experiments"),
    "psm_core/network/modules.py": ("psm_core.factorization", "psm_core.methods"),
    "psm_core/network/calibration.py": ("psm_core.factorization", "psm_core.methods"),
    "psm_core/network": ("psm_core.experiments", "psm_core.checkpoint"),
    "psm_core/device.py": ("psm_core.factorization", "psm_core.methods", "psm_core.network"),
    "psm_core/demo": ("psm_core.methods", "psm_core.network", "psm_core.experiments"),
    "psm_core/experiments": ("psm_core.checkpoint", "psm_core.plots", "psm_core.cli"),
    "psm_core/checkpoint.py": ("psm_core.plots", "psm_core.cli"),
    "psm_core/plots.py": ("psm_core.checkpoint", "psm_core.cli"),
    "pages": ("app", "tests"),
}
# A program of its own, that nothing imports, stands above all it uses.
PROGRAMS = (Path("psm_core/experiments/worker.py"),)


def imports(nodes: list[ast.stmt], everywhere: bool) -> Iterator[str]:
    """The modules that statements import: all of them, or only those needed to import the file."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif everywhere or not (_is_typing_only(node) or isinstance(node, ast.FunctionDef)):
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            yield from imports(inner, everywhere)


def _is_typing_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def found(source: Path, everywhere: bool = False) -> list[str]:
    """The modules that a file imports."""
    return list(imports(ast.parse((ROOT / source).read_text(encoding="utf-8")).body, everywhere))


def within(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of the packages or inside one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("place", ABOVE)
def test_imports_flow_one_way(place: str) -> None:
    files = [source for source in SOURCES if source.is_relative_to(place)]
    assert files, f"{place} has no source file"
    files = [file for file in files if file not in PROGRAMS or place == "psm_core"]
    wrong = [(str(file), name) for file in files for name in found(file) if within(name, ABOVE[place])]
    assert not wrong


def test_the_library_never_imports_streamlit_or_the_app() -> None:
    """Not even inside a function."""
    library = [source for source in SOURCES if source.is_relative_to("psm_core")]
    wrong = [(str(f), n) for f in library for n in found(f, everywhere=True) if within(n, ABOVE["psm_core"])]
    assert not wrong


def test_the_import_reader_sees_nested_imports() -> None:
    code = "def f():\n    import streamlit as st\nif TYPE_CHECKING:\n    from a.b import c\nimport d"
    body = ast.parse(code).body
    assert list(imports(body, everywhere=True)) == ["streamlit", "a.b.c", "d"]
    assert list(imports(body, everywhere=False)) == ["d"]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_file_is_short(source: Path) -> None:
    assert len((ROOT / source).read_text(encoding="utf-8").splitlines()) <= LONGEST


def requirements(name: str) -> set[str]:
    """The lines of a requirements file."""
    lines = (ROOT / name).read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_requirements_are_those_of_the_library_and_streamlit() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = requirements("requirements.txt")
    assert {line for line in listed if not line.startswith("streamlit")} == set(project["dependencies"])
    assert any(line.startswith("streamlit>=") for line in listed)


def test_ci_runs_the_command_of_the_readme() -> None:
    command = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert command.endswith("-m tests")
    assert command in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_the_app_asks_nothing_and_reports_nothing() -> None:
    config = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())
    assert config["server"]["showEmailPrompt"] is False
    assert config["browser"]["gatherUsageStats"] is False
