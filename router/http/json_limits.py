"""Bounds on the number of values in a JSON body, checked before it is parsed.

Eight megabytes of ``[],`` are millions of objects. Parsing them blocks the process, since the
parser holds the interpreter lock meanwhile.
"""

from router.errors import ApiError
from router.limits import MAX_STRINGS, MAX_VALUES, UNCHECKED_BYTES


def max_json_values(max_model_tokens: int) -> int:
    """Return the maximum number of values in a body. It grows with the model's context, since a
    prompt may be a list of token ids."""
    return MAX_VALUES + 2 * max_model_tokens


def check_json_size(data: bytes, max_values: int = MAX_VALUES) -> None:
    """Raise ApiError (400) for a body with too many values or strings. Data that is not JSON may
    pass; the parser refuses it."""
    if len(data) <= UNCHECKED_BYTES:
        return
    if _num_values(data) > max_values or data.count(b'"') > 2 * MAX_STRINGS:
        _check_outside_strings(data, max_values)


def _check_outside_strings(data: bytes, max_values: int) -> None:
    """Raise ApiError (400) for too many strings or values. Values are counted by their commas and
    brackets, except for those inside of strings."""
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = bare.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise _too_many(f"the body has {num_strings} strings, keys included", MAX_STRINGS)
    num_values = _num_values(b"".join(bare.split(b'"')[::2]))
    if num_values > max_values:
        raise _too_many(f"the body has {num_values} values", max_values)


def _num_values(data: bytes) -> int:
    """Return an upper bound on the number of values: each value follows a comma, unless it is the
    first one of a list or an object."""
    return 1 + data.count(b",") + data.count(b"[") + data.count(b"{")


def _too_many(found: str, bound: int) -> ApiError:
    message = f"{found}; it may have at most {bound}: split it into several requests"
    return ApiError(400, message, code="too_many_values")
