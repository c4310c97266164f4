"""The arguments of calls to custom tools, which the model writes as JSON."""

import orjson

from router.responses.tools import CUSTOM_INPUT


def encode_custom_arguments(text: str) -> str:
    """Return the arguments with which a function gets a custom tool's input."""
    return orjson.dumps({CUSTOM_INPUT: text}).decode()


def decode_custom_arguments(arguments: str) -> str:
    """Return a custom tool's input. If the model wrote something else than the input's JSON
    object, or its answer ended within it, the arguments are returned as they are."""
    try:
        value = orjson.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
