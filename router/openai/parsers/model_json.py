"""Parses JSON that a model has written."""

import json
import re
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_model_json(text: str) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested too deep, or has an unpaired
    surrogate, which can't be sent to a client."""
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("the value is nested too deep") from error
    return value
