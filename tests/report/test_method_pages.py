"""The pages of docs/methods say what the code says."""

from pathlib import Path

from fedflat.report.method_pages import pages

FOLDER = Path(__file__).parents[2] / "docs" / "methods"


def test_every_method_has_its_page_and_every_page_is_current():
    written = {file.name: file.read_text("utf-8") for file in FOLDER.glob("*.md")}
    assert written == pages(), "run: make results"
