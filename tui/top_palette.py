"""What the roles of spans look like in a theme."""

from __future__ import annotations

from collections.abc import Mapping

from rich.style import Style
from textual.color import Color

from .top_lines import Span

# Role -> variable of the theme, and whether it is bold.
_ROLES: Mapping[str, tuple[str, bool]] = {
    "dim": ("foreground-muted", False),
    "text": ("foreground", False),
    "strong": ("foreground", True),
    "title": ("text-accent", True),
    "used": ("success", False),
    "shared": ("accent", False),
    "cached": ("primary", False),
    "prefill": ("warning", False),
    "decode": ("success", False),
    "time": ("text-primary", False),
    "warn": ("warning", False),
    "bad": ("error", True),
    "cursor": ("panel", False),
}


class Palette:
    """Styles of one theme, each made once."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._made: dict[tuple[str, str], Style] = {}
        self._variables = variables

    def style(self, span: Span) -> Style:
        key = (span.role, span.ground)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._make(*key)
        return found

    def _make(self, role: str, ground: str) -> Style:
        variable, bold = _ROLES[role]
        behind = self._color(_ROLES[ground][0]) if ground else None
        return Style(color=self._color(variable), bgcolor=behind, bold=bold)

    def _color(self, variable: str) -> str:
        """The variable's colour as it shows on the background."""
        color = Color.parse(self._variables[variable])
        return Color.parse(self._variables["background"]).blend(color, color.a, alpha=1.0).rich_color.name
