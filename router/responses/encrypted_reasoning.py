"""Reasoning as ``encrypted_content``, for clients that keep a conversation themselves.

OpenAI hides its models' reasoning, so it encrypts this field. Baton also returns the reasoning as
plain text, so it only encodes the field. Reasoning that a client sends back is treated as the
client's text, like any other reasoning in the input."""

import base64
import binascii

PREFIX = "baton-v1:"
"""Distinguishes Baton's reasoning from the reasoning of other servers, which can't be read."""


def encode_reasoning(text: str) -> str:
    return PREFIX + base64.b64encode(text.encode(errors="replace")).decode()


def decode_reasoning(content: str) -> str | None:
    """Return the reasoning; None if another server has encrypted it."""
    if not content.startswith(PREFIX):
        return None
    try:
        return base64.b64decode(content.removeprefix(PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
