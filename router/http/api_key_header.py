"""The header in which a client sends its API key."""

from starlette.types import Scope

from router.errors import ApiError
from router.http.response_writer import get_header
from router.tenants.authentication import bearer_key


def api_key_header(scope: Scope) -> str | None:
    """Return the value of ``Authorization``. A key in ``x-api-key``, as Anthropic's clients send
    it, is returned in the same form, ``Bearer KEY``. Returns None if neither header is present.
    Raises ApiError (400) if both are present with different keys: a proxy might check the one, and
    the router bill the other."""
    authorization, key = get_header(scope, b"authorization"), get_header(scope, b"x-api-key")
    if authorization is None or key is None:
        return authorization if key is None else f"Bearer {key}"
    if bearer_key(authorization) not in ("", key.strip()):
        raise ApiError(
            400, "the Authorization and x-api-key headers have different keys; send only one"
        )
    return authorization
