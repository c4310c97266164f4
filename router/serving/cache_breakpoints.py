"""Finds the positions of a chat's cache breakpoints (``cache_control``) in its prompt, in tokens
and in blocks."""

from collections.abc import Sequence
from dataclasses import replace

from baton.core.ids import BlockKey
from baton.text.tokenizer import Tokenizer
from router.errors import invalid_field
from router.generation.prefix_pinner import PrefixPin
from router.serving.chat_renderer import ChatRenderer, make_unique_marker
from router.serving.request import Chat
from router.serving.schema.message import Message

MAX_BREAKPOINTS = 4
"""The maximum number of breakpoints of a request, as in Anthropic's API."""


def find_prefix_pins(
    chat: Chat,
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    keys: Sequence[BlockKey],
    block_tokens: int,
    max_characters: int,
) -> tuple[PrefixPin, ...]:
    """Return the prefixes of the prompt to pin: for each time to live, the longest prefix that ends
    at a breakpoint, in whole blocks. A prefix is left out if a prefix with a longer time to live
    covers it. Raises ApiError for too many breakpoints, or Invalid for a prompt of more than
    ``max_characters``."""
    longest: dict[float, str] = {}
    for prefix, seconds in _prefixes(chat, ChatRenderer(tokenizer), max_characters):
        longest[seconds] = prefix
    pins: list[PrefixPin] = []
    special = chat.adds_special_tokens
    for seconds, prefix in sorted(longest.items(), reverse=True):
        num_tokens = _common_prefix_length(
            tokenizer.encode(prefix, add_special_tokens=special), token_ids
        )
        blocks = tuple(keys[: num_tokens // block_tokens])
        if not pins or len(blocks) > len(pins[-1].block_keys):
            pins.append(PrefixPin(num_tokens, blocks, seconds))
    return tuple(pins)


def _prefixes(chat: Chat, renderer: ChatRenderer, max_characters: int) -> list[tuple[str, float]]:
    """Return, for each breakpoint in order, the prompt's text before it and the time to live of
    this prefix in seconds.

    To find the text, the chat is rendered with markers in its messages. Returns an empty list if
    the template leaves out or repeats some of the markers."""
    ttls = [seconds for message in chat.messages for _, seconds in message.breakpoints]
    if not ttls:
        return []
    if len(ttls) > MAX_BREAKPOINTS:
        message = f"a request may have at most {MAX_BREAKPOINTS} cache breakpoints, not {len(ttls)}"
        raise invalid_field(chat.names.prompt, message)
    marker = make_unique_marker(message.content for message in chat.messages)
    marked = [_with_marker(message, marker) for message in chat.messages]
    marked_chat = replace(chat, messages=marked)
    pieces = renderer.render(marked_chat, max_characters).split(marker)
    if len(pieces) != len(ttls) + 1:
        return []
    return [("".join(pieces[: index + 1]), seconds) for index, seconds in enumerate(ttls)]


def _with_marker(message: Message, marker: str) -> Message:
    content = message.content
    for characters, _ in reversed(message.breakpoints):
        content = content[:characters] + marker + content[characters:]
    return message.model_copy(update={"content": content})


def _common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens at the beginning of both sequences are the same."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)
