"""Equations of docstrings as MathML.

A docstring writes mathematics as text, so that `help()` and a terminal show it: `hᵢ ← hᵢ + Δᵢ/(K η)`. This module turns
such a block into MathML, which browsers show without scripts or downloads. It knows what the docstrings use: letters
with accents, primes, Unicode and `_` `^{…}` scripts, ‖…‖, √, a/b without blanks as a fraction, words, and columns that
are three blanks apart. A word and a colon at the start of a line (`client:`) become a column of their own.
"""

from __future__ import annotations

import re
import unicodedata
from html import escape
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

SUBSCRIPTS = dict(zip("ᵢⱼₖₙₘₜ₀₁₂₃₄₅₆₇₈₉₊₋", "ijknmt0123456789+−", strict=True))
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵗᵏᵀʳⁿ", "0123456789+−tkTrn", strict=True))
ACCENTS = {"̂": "^", "̃": "~", "̄": "¯", "̇": "˙"}
CLOSING = {"(": ")", "[": "]", "{": "}", "⌈": "⌉", "⌊": "⌋", "‖": "‖"}
MATHS = re.compile(r"[←∇Σ⊙√ᵢε⊗]|τ²|λ₁|Δ_|e\^\{|^\s*move = ", re.M)
OUTPUT = re.compile(r"\d\.\d{3}|^\s*(fedflat|pip|make|python|\$|\[|#|>)|\"|^\s*def |[┃│━]", re.M)
LABEL = re.compile(r"([a-z]+:|[A-Z]\d)\s+")
TOKEN = re.compile(r"\s+|`[^`]*`|\d+(?:\.\d+)?|(?:[A-Za-z]{2,}(?:['’][a-z]+)?|[A-Z]\d)|[^\W\d_][̀-ͯ]*|.", re.S)


class Parser:
    """Recursive descent over the tokens of one piece of a line."""

    def __init__(self, text: str) -> None:
        text = unicodedata.normalize("NFD", text)
        self.tokens = TOKEN.findall(text)
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else ""

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def row(self, end: str = "", small: bool = False) -> str:
        """Parse up to the closing sign `end`. Fractions in scripts (`small`) keep their slash."""
        done: list[str] = []
        while self.at < len(self.tokens) and not (end and self._closes(end)):
            if self.peek().isspace():
                self.take()
                if done and (self._wordlike(self.peek()) or done[-1].startswith(("<mtext", "<msub><mtext"))):
                    done.append('<mspace width="0.3em"/>')
            elif self.peek() == "/" and not small and done and self._tight():
                self.take()
                done.append(f"<mfrac>{_bare(done.pop())}{_bare(self.factor())}</mfrac>")
            else:
                done.append(self.factor())
        if self.at < len(self.tokens):
            self.take()
        return "".join(done)

    def _closes(self, end: str) -> bool:
        return self.peek() == end and not (end == "‖" and self._apart())

    def _apart(self) -> bool:
        """‖ with blanks on both sides separates, as in KL(p ‖ q)."""
        return self.tokens[self.at - 1].isspace() and self.peek(1).isspace()

    def _tight(self) -> bool:
        return not self.tokens[self.at - 1].isspace() and not self.peek(1).isspace()

    @staticmethod
    def _wordlike(token: str) -> bool:
        return len(token) > 1 and token[0].isalpha() and token.isascii()

    def factor(self) -> str:
        """One atom with its scripts."""
        token = self.take()
        if token == "Δ" and self.peek()[:1].isalpha() and self.peek()[0] not in SUBSCRIPTS | SUPERSCRIPTS:
            return f"<mrow>{atom(token)}{self.factor()}</mrow>"
        if token == "a" and self.at > 2 and self._wordlike(self.tokens[self.at - 3]) and self.peek().isspace():
            return "<mtext>a</mtext>"
        if token in CLOSING and not (token == "‖" and self._apart_before()):
            inside = self.row(CLOSING[token])
            base = f'<mrow data-group="{token}">{_fence(token)}{inside}{_fence(CLOSING[token])}</mrow>'
        elif token == "√":
            base = f"<msqrt>{_bare(self.radicand())}</msqrt>"
        else:
            base = atom(token)
        return self.scripts(base)

    def radicand(self) -> str:
        first = self.factor()
        return first + self.factor() if self.peek() == "(" else first

    def _apart_before(self) -> bool:
        return self.at > 1 and self.tokens[self.at - 2].isspace() and self.peek().isspace()

    def scripts(self, base: str) -> str:
        below, above = "", ""
        while self.peek():
            sign = self.peek()
            if sign in SUBSCRIPTS:
                below += atom(SUBSCRIPTS[self.take()])
            elif sign in SUPERSCRIPTS:
                above += atom(SUPERSCRIPTS[self.take()])
            elif sign in ("'", "′"):
                self.take()
                above += "<mo>′</mo>"
            elif sign in ("_", "^") and (self.peek(1) == "{" or self.peek(1)[:1].isalnum()):
                self.take()
                script = self.braces() if self.peek() == "{" else atom(self.take())
                below, above = (below + script, above) if sign == "_" else (below, above + script)
            else:
                break
        if below and above:
            return f"<msubsup>{base}<mrow>{below}</mrow><mrow>{above}</mrow></msubsup>"
        if below:
            return f"<msub>{base}<mrow>{below}</mrow></msub>"
        return f"<msup>{base}<mrow>{above}</mrow></msup>" if above else base

    def braces(self) -> str:
        self.take()
        return self.row("}", small=True)


def atom(token: str) -> str:
    """One token as a MathML element."""
    if token.startswith("`"):
        return f"<mtext>{escape(token.strip('`'))}</mtext>"
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    if len(token) > 1 and token[1] in ACCENTS:
        return f'<mover accent="true"><mi>{escape(token[0])}</mi><mo>{ACCENTS[token[1]]}</mo></mover>'
    if Parser._wordlike(token) or len(token) > 2:
        return f"<mtext>{escape(token)}</mtext>"
    if token[0].isalpha() and token != "Σ":
        upright = ' class="upright"' if token in "ΔΛ" else ""
        return f"<mi{upright}>{escape(token)}</mi>"
    return f'<mo stretchy="false" largeop="false">{"∑" if token == "Σ" else escape(token)}</mo>'


def _fence(sign: str) -> str:
    return f'<mo stretchy="false" form="{"prefix" if sign in CLOSING and sign != "‖" else "postfix"}">{sign}</mo>'


def _bare(element: str) -> str:
    """A group in parentheses without them, as numerator, denominator or radicand."""
    found = re.fullmatch(r'<mrow data-group="\(">(<mo [^>]*>\(</mo>)(.*)(<mo [^>]*>\)</mo>)</mrow>', element)
    return f"<mrow>{found[2]}</mrow>" if found else f"<mrow>{element}</mrow>"


def mathml(text: str) -> str:
    """One piece of a line as a `<math>` element; its source is the alternative text."""
    return f'<math displaystyle="true" alttext="{escape(text)}">{Parser(text).row()}</math>'


def equations(lines: list[str]) -> str:
    """A block of lines as rows of equations."""
    rows = []
    for line in lines:
        text = line.strip()
        if not text:
            continue
        label = LABEL.match(text)
        pieces = re.split(r"\s{3,}", text[label.end() :] if label else text)
        cells = "".join(mathml(piece) for piece in pieces if piece)
        rows.append(f"<dt>{label[1] if label else ''}</dt><dd>{cells}</dd>")
    return f'<dl class="equations">{"".join(rows)}</dl>'


def is_maths(lines: list[str]) -> bool:
    """Return whether an indented block is mathematics rather than code, commands or their output."""
    block = "\n".join(lines)
    return bool(MATHS.search(block)) and not OUTPUT.search(block)


class Equations(Preprocessor):
    """Replaces indented blocks of mathematics. Runs after fenced code has been put aside."""

    def run(self, lines: list[str]) -> list[str]:
        done: list[str] = []
        block: list[str] = []
        before = ""
        for line in [*lines, "end"]:
            if line.startswith("    ") and (block or not before.strip()):
                block.append(line)
                continue
            if block and not line.strip():
                block.append("")
                continue
            if block:
                done += [self.md.htmlStash.store(equations(block)), ""] if is_maths(block) else block
                block = []
            done.append(line)
            before = line
        return done[:-1]


class MathsExtension(Extension):
    """`markdown_extensions = ["docsite.maths"]`."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (the name is Markdown's)
        md.preprocessors.register(Equations(md), "equations", 22)


def makeExtension(**options: Any) -> MathsExtension:  # noqa: N802 (the name is Markdown's)
    return MathsExtension(**options)
