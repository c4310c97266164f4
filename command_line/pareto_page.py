"""Writes the page of ``baton plan --pareto``: one file that works without a server and without a
network."""

import html
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets" / "pareto"

_PLACEHOLDER = re.compile(r"\[\[(\w+)\]\]")

_ESCAPES = {
    ord(character): f"\\u{ord(character):04x}" for character in ("<", ">", "&", "\u2028", "\u2029")
}
"""Characters that could end the script element, or begin another element. They only occur within
JSON's strings, where they can be escaped."""


def render_page(report: Mapping[str, Any], title: str) -> str:
    """Return the page for a report (:meth:`simulator.pareto.ParetoReport.as_dict`), which it
    contains as JSON. The page's policy allows its own style and script only, by their hashes."""
    style, script = _read_asset("page.css"), _read_asset("page.js")
    parts = {
        "policy": _policy(style, script),
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": json.dumps(report).translate(_ESCAPES),
    }
    # In a single pass, so that placeholders within the values stay as they are.
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], _read_asset("page.html"))


def _policy(style: str, script: str) -> str:
    """Return the content security policy. The position of the tip is set by the script through
    ``element.style``, which no policy restricts."""
    return f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}"


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _read_asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
