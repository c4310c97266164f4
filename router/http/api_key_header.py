"""The header in which a client sends its API key."""

from starlette.types import Scope

from router.http.response_writer import get_header


def api_key_header(scope: Scope) -> str | None:
    """Return the value of ``Authorization``. A key in ``x-api-key``, as Anthropic's clients send
    it, is returned in the same form, ``Bearer KEY``. Returns None if neither header is present."""
    authorization = get_header(scope, b"authorization")
    if authorization is not None:
        return authorization
    key = get_header(scope, b"x-api-key")
    return f"Bearer {key}" if key is not None else None
