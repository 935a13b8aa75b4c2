"""The notebooks as they are committed, and what the repository must not say."""

import ast
import functools
import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
from docutils.frontend import get_default_settings
from docutils.parsers.rst import Parser
from docutils.utils import new_document
from sphinx.ext.napoleon import Config, NumpyDocstring

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "book").rglob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_clean(path):
    cells = json.loads(path.read_text())["cells"]
    assert len({c["id"] for c in cells}) == len(cells)
    for cell in cells:
        source = "".join(cell["source"])
        assert source.strip(), "an empty cell"
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None, "commit notebooks without outputs"
            assert len(source.splitlines()) <= 15, source
    code = [c for c in cells if c["cell_type"] == "code"]
    assert "google.colab" in "".join(code[0]["source"]) and "remove-cell" in code[0]["metadata"]["tags"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_figures_have_alt_texts(path):
    """A cell that ends in a figure says what the figure shows."""
    for cell in json.loads(path.read_text())["cells"]:
        last = "".join(cell["source"]).strip().splitlines()[-1]
        if cell["cell_type"] == "code" and re.match(r"(curve|image_rows|true_beside_recovered|figure)\b(?!\s*=)", last):
            assert len(cell["metadata"]["mystnb"]["image"]["alt"]) > 20


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_in_the_table_of_contents(path):
    assert str(path.relative_to(ROOT).with_suffix("")) in (ROOT / "_toc.yml").read_text()


def test_modules_stay_small():
    for path in (ROOT / "cafe_tutorial").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 300, path


def test_no_path_of_a_machine_in_a_tracked_file():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pattern = re.compile(r"(?<![\w.~-])/(work|home|root|Users|tmp)/")
    for name in tracked:
        text = (ROOT / name).read_bytes()
        if b"\0" not in text and name != "tests/test_repository.py":
            assert not pattern.search(text.decode()), name


@functools.cache
def _extension(name: str):
    """A module of the book's own Sphinx extensions."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "book" / "_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _documented():
    for path in sorted((ROOT / "cafe_tutorial").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'name', 'module')}", text


def _markup_faults(text: str) -> list[str]:
    """What reStructuredText finds wrong with a docstring, read as the book's API page reads it."""
    lines = text.splitlines()
    _extension("docstrings").escape(None, None, None, None, None, lines)
    shown = NumpyDocstring("\n".join(lines), Config(napoleon_numpy_docstring=True)).lines()
    found = []
    settings = get_default_settings(Parser)
    settings.report_level, settings.halt_level, settings.warning_stream = 2, 5, False
    document = new_document("docstring", settings)
    document.reporter.attach_observer(lambda message: found.append((message["level"], message.astext())))
    Parser().parse("\n".join(shown), document)
    return [text for level, text in found if level >= 2 and not re.search("Unknown (interpreted text role|directive type)", text)]  # Sphinx's own


def test_docstrings_are_sound_markup():
    assert _markup_faults("One.\n\nx : a thing\n    that hangs. y : another\n  z") != []
    faults = {name: found for name, text in _documented() if (found := _markup_faults(text))}
    assert not faults, faults
