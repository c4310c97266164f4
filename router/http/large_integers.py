"""Rounds the integers of a JSON body that have more than 64 bits to floats.

Most JSON encoders, ours among them, can't write such integers, so an answer that repeats values of
the body could not be encoded.
"""

import re

import orjson

from router.errors import ApiError, not_json

_LONG_INTEGER = re.compile(rb"[1-9][0-9]{18}")
"""Finds all integers of more than 64 bits, but also shorter ones, and digits inside of strings. It
is simple because every body is searched."""


def round_large_integers(data: bytes) -> bytes:
    """Return the body with floats in place of integers of more than 64 bits. Raises ApiError (400)
    for a number that is too large for a float, and for some bodies that are not JSON."""
    if _LONG_INTEGER.search(data) is None:
        return data
    try:
        return orjson.dumps(orjson.loads(data))
    except orjson.JSONDecodeError as error:
        raise ApiError(400, not_json("the body", error), code="invalid_json") from error
    except orjson.JSONEncodeError:  # nested too deeply, which the parser reports
        return data
