"""Encodes JSON that contains values from clients."""

import json
from typing import Any

import orjson

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1


def encode_json(value: Any) -> bytes:
    """Encode a value. Integers of more than 64 bits, which orjson refuses, become floats; integers
    that are too large for a float become null. Raises TypeError or ValueError for a value that is
    not JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(json.loads(json.dumps(value), parse_int=_parse_integer))


def _parse_integer(text: str) -> int | float:
    value = int(text)
    return value if MIN_INTEGER <= value <= MAX_INTEGER else float(text)
