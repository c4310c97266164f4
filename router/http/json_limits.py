"""Bounds on how much a body of JSON holds, checked before it is parsed.

Eight megabytes of ``[],`` are millions of objects, and parsing them holds everybody up: no thread
runs Python meanwhile.
"""

from router.errors import ApiError

UNCHECKED_BYTES = 32 * 1024
"""What is no larger is parsed in a millisecond, whatever it holds."""

MAX_STRINGS = 131_072
"""Keys among them. As many messages as a chat may have take three quarters of it."""

MAX_VALUES = 262_144
"""Beside those that prompts of tokens need: see :func:`max_json_values`."""


def max_json_values(max_model_tokens: int) -> int:
    """Values that a body may have: a model with a large context takes prompts of many tokens."""
    return MAX_VALUES + 2 * max_model_tokens


def check_json_size(data: bytes, max_values: int = MAX_VALUES) -> None:
    """Raises Problem (400) for a body with too many values or strings. Data that is no JSON may
    pass, and is refused by whoever parses it."""
    if len(data) <= UNCHECKED_BYTES:
        return
    if _num_values(data) > max_values or data.count(b'"') > 2 * MAX_STRINGS:
        _check_outside_strings(data, max_values)


def _check_outside_strings(data: bytes, max_values: int) -> None:
    """Without what stands within strings. Escapes are only there."""
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = bare.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise _too_many(f"{num_strings} strings, keys included", MAX_STRINGS)
    num_values = _num_values(b"".join(bare.split(b'"')[::2]))
    if num_values > max_values:
        raise _too_many(f"{num_values} values", max_values)


def _num_values(data: bytes) -> int:
    """At most: each value but the first of a list or an object follows a comma."""
    return 1 + data.count(b",") + data.count(b"[") + data.count(b"{")


def _too_many(found: str, bound: int) -> ApiError:
    message = f"the body has {found}, and may have at most {bound}: send it in several requests"
    return ApiError(400, message, code="too_many_values")
