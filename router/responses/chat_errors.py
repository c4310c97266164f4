"""Rewords errors about a chat in terms of the request that the chat was made from."""

import re
from collections.abc import Sequence

from router.errors import MAX_CHARACTERS, ApiError

FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The chat's fields that have another name in the Responses API."""

_NAME = re.compile(
    r"""(?<!\w)(?P<quoted>'(?:[^'\\]|\\.)*(?:'|\Z)|"(?:[^"\\]|\\.)*(?:"|\Z))"""
    r"|\bmessages\[(?P<number>\d{1,9})\](?:\.\w+)*"
    r"|\btools\[(?P<tool>\d{1,9})\]\.function(?=\.parameters\b)"
    rf"|(?<![\w.])(?P<field>{'|'.join(FIELDS)})\b"
)
"""Matches a message, a tool's schema or a field of a chat. Quoted text, which may be any client's
text, is matched, too, so that it stays as it is."""


def translate_error(
    error: ApiError, message_paths: Sequence[str], tool_paths: Sequence[str]
) -> ApiError:
    """Return the error with the names of the request's fields in place of the chat's names.
    ``message_paths`` are the places in the request from which the texts of the chat's messages
    come, and ``tool_paths`` those of the chat's tools."""

    def name(match: re.Match[str]) -> str:
        if match["quoted"]:
            return match[0]
        if match["field"]:
            return FIELDS[match["field"]]
        if match["tool"]:
            return tool_paths[int(match["tool"])]
        number = int(match["number"])
        return message_paths[number] if number < len(message_paths) else "input"

    def translate(text: str) -> str:
        return _NAME.sub(name, text[: MAX_CHARACTERS + 1])

    return ApiError(
        error.status,
        translate(str(error)),
        error_type=error.error_type,
        param=translate(error.param) if error.param is not None else None,
        code=error.code,
        headers=error.headers,
    )
