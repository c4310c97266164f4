"""HTML pages for people: the start page (``/``), and the list of routes (``/docs``). They contain
no scripts and load nothing, so they need no network and no exceptions from a security policy."""

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from typing import Any

from router.api_document.document import build_document

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}

LINKS = {
    "/ui": "the console: the cluster live, and a chat",
    "/docs": "the routes",
    "/openapi.json": "the same as an OpenAPI document",
    "/v1/models": "the model",
    "/ready": "whether requests are accepted",
}

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse }} td {{ padding: .2em 1em .2em 0; vertical-align: top }}
code {{ font-family: ui-monospace, monospace }}
.open a {{ display: inline-block; padding: .5em 1em; border: 2px solid; border-radius: .4em }}
:root {{ color-scheme: light dark }}
</style></head>
<body><h1>{title}</h1>
{content}
</body></html>
"""


def describe_server(version: str) -> dict[str, Any]:
    """Return the JSON object with which ``/`` responds to programs."""
    return {"name": "baton", "version": version, "links": LINKS}


@cache
def start_page(version: str) -> str:
    """Return the page at ``/`` for browsers."""
    rows = [(f'<a href="{path}"><code>{path}</code></a>', text) for path, text in LINKS.items()]
    text = (
        "<p>Baton serves large language models on separate pools of prefill and decode workers. "
        "OpenAI's API is at <code>/v1</code>.</p>\n"
        '<p class="open"><a href="/ui">Open the console</a></p>\n'
    )
    return _page(f"Baton {version}", text + _table(rows))


@cache
def routes_page(version: str) -> str:
    """Return the page at ``/docs``: a table of all routes, from the OpenAPI document."""
    document = build_document(version)
    rows = [
        (
            f"<code>{method.upper()}</code>",
            f"<code>{escape(path)}</code>",
            escape(operation["summary"]),
            _access(operation),
        )
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    text = '<p>The details are in <a href="/openapi.json"><code>/openapi.json</code></a>.</p>'
    return _page(f"Baton {version}: routes", text + _table(rows))


def _access(operation: dict[str, Any]) -> str:
    """Return who may use a route."""
    schemes = {name for each in operation["security"] for name in each}
    return "admins" if "admin_key" in schemes else "API key" if schemes else "everybody"


def _table(rows: Iterable[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return "<table>\n" + "\n".join(f"<tr>{row}</tr>" for row in cells) + "\n</table>"


def _page(title: str, content: str) -> str:
    return _PAGE.format(title=escape(title), content=content)
