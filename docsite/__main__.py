"""Builds the documentation site in build/site, without a network: `python -m docsite`, or `make docs`.

1. Copy docs/ to build/docs, with CHANGELOG, CONTRIBUTING and SECURITY beside it.
2. Execute the notebooks; their outputs become part of their pages (`--quick` leaves them out).
3. Build with Zensical in strict mode: a warning is an error.
4. Check every link, and that no page loads anything from another host.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

from docsite import links, notebooks

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
PAGES = BUILD / "docs"
TOP = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
REPOSITORY = re.compile(r"\[([^\]]+)\]\(\.\./(?!docs/)(?:\.\./)*([^)#]+)(#[^)]*)?\)")

FOLDER = re.compile(r"\[([^\]]+)\]\((?:[\w-]+/)*[\w-]+/?\)")  # a link to a folder, which has no page


def collect() -> None:
    """The pages of the site, from docs/ and the top of the repository."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.ipynb"))
    for file, page in TOP.items():
        if (ROOT / file).exists():
            text = (ROOT / file).read_text("utf-8").replace("](docs/", "](")
            for other, its in TOP.items():
                text = text.replace(f"]({other}", f"]({its}")
            (PAGES / page).write_text(text, "utf-8")
    for path in PAGES.rglob("*.md"):
        up = "../" * (len(path.relative_to(PAGES).parts) - 1)
        text = path.read_text("utf-8").replace(".ipynb)", ".md)")
        text = REPOSITORY.sub(lambda found, up=up: _top(found, up), text)
        path.write_text(FOLDER.sub(r"\1", text), "utf-8")


def _top(found: re.Match[str], up: str) -> str:
    """A link to a file above docs/: to its page if it has one, otherwise its name."""
    text, file, anchor = found.groups()
    return f"[{text}]({up}{TOP[file]}{anchor or ''})" if file in TOP else f"`{file}`" if "`" not in text else text


def tutorials(quick: bool) -> None:
    """The notebooks as pages."""
    package = notebooks.source_digest(ROOT / "src")[:12]
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        run = (
            nbformat.read(path, as_version=4)
            if quick
            else notebooks.executed(path, BUILD / "workshop" / path.stem, BUILD / "executed" / package)
        )
        text = notebooks.page(run, PAGES / "tutorials" / path.stem)
        (PAGES / "tutorials" / f"{path.stem}.md").write_text(text, "utf-8")


def configured() -> Path:
    """The configuration with one entry of the navigation for each method."""
    names = sorted(path.stem for path in (PAGES / "methods").glob("*.md") if path.stem != "README")
    entries = "".join(f'{{ "{name}" = "methods/{name}.md" }}, ' for name in names)
    text = (ROOT / "docsite" / "zensical.toml").read_text("utf-8")
    path = BUILD / "zensical.toml"
    path.write_text(text.replace('"methods/*.md",', entries), "utf-8")
    return path


def at_home() -> None:
    """The theme fetches a shim for the search of pages on disk from another host; ours is among the assets."""
    for path in (BUILD / "site").rglob("*.html"):
        up = "../" * (len(path.relative_to(BUILD / "site").parts) - 1)
        text = path.read_text("utf-8").replace("https://unpkg.com/iframe-worker/shim", f"{up}assets/file-worker.js")
        path.write_text(text, "utf-8")


def main() -> int:
    quick = "--quick" in sys.argv
    BUILD.mkdir(exist_ok=True)
    collect()
    tutorials(quick)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(configured())]
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        return code
    at_home()
    found = links.faults(BUILD / "site")
    print("\n".join(found) or f"{len(list((BUILD / 'site').rglob('*.html')))} pages, all links lead somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
