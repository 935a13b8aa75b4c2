"""The notebooks as they are committed, and what the repository must not say."""

import json
import re
import subprocess
from pathlib import Path

import pytest

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
