"""Doctests in docstrings as highlighted code: `>>>` up to the next empty line becomes a fenced block."""

from __future__ import annotations

from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor


class Doctests(Preprocessor):
    """Runs before fenced code is put aside, and leaves what is already fenced."""

    def run(self, lines: list[str]) -> list[str]:
        done: list[str] = []
        fenced = inside = False
        for line in [*lines, ""]:
            if line.lstrip().startswith("```"):
                fenced = not fenced
            if line.startswith(">>>") and not (fenced or inside):
                inside = True
                done += ["", "```pycon"]
            elif inside and not line.strip():
                inside = False
                done.append("```")
            done.append(line)
        return done[:-1]


class DoctestExtension(Extension):
    """`markdown_extensions = ["docsite.doctests"]`."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (the name is Markdown's)
        md.preprocessors.register(Doctests(md), "doctests", 27)


def makeExtension(**options: Any) -> DoctestExtension:  # noqa: N802 (the name is Markdown's)
    return DoctestExtension(**options)
