"""The arguments of calls to custom tools, which the model writes as JSON."""

import orjson

from router.responses.tools import CUSTOM_INPUT


def encode_custom_arguments(text: str) -> str:
    """Return the arguments of a function call that passes ``text`` to a custom tool."""
    return orjson.dumps({CUSTOM_INPUT: text}).decode()


def decode_custom_arguments(arguments: str) -> str:
    """Return a custom tool's input. Arguments that are not the expected JSON object, for example
    because the answer ended within them, are returned as they are."""
    try:
        value = orjson.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
