"""Mermaid diagrams as inline SVG, drawn while the site is built."""

from __future__ import annotations

from typing import Any

import merm


def fence(source: str, language: str, css_class: str, options: Any, md: Any, **more: Any) -> str:
    """A formatter of `pymdownx.superfences`. The colours follow the page."""
    svg = merm.render_diagram(source)
    for fixed, followed in (("#333333", "currentColor"), ("white", "transparent"), ("#ECECFF", "transparent")):
        svg = svg.replace(fixed, followed)
    return f'<div class="diagram">{svg}</div>'
