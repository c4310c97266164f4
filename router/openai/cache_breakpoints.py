"""Where the breakpoints of a chat (``cache_control``) lie in its prompt: tokens, and blocks."""

from collections.abc import Sequence

from baton.core.ids import BlockKey
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.generation.prefix_pinner import PrefixPin
from router.openai.chat_renderer import ChatRenderer
from router.openai.schema import ChatBody, Message
from router.openai.schema.tool import Tool
from router.openai.unique_marker import make_unique_marker

MAX_BREAKPOINTS = 4
"""Of a request, as Anthropic has it."""


def find_prefix_pins(
    body: ChatBody,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    keys: Sequence[BlockKey],
    block_tokens: int,
) -> tuple[PrefixPin, ...]:
    """The longest prefix for each time, whole blocks only: what is shorter is part of it. Raises
    Problem for too many breakpoints."""
    longest: dict[float, str] = {}
    for prefix, seconds in _prefixes(body, tools, ChatRenderer(tokenizer)):
        longest[seconds] = prefix
    pins: list[PrefixPin] = []
    special = bool(body.add_special_tokens)
    for seconds, prefix in sorted(longest.items(), reverse=True):
        num_tokens = _common_prefix_length(
            tokenizer.encode(prefix, add_special_tokens=special), token_ids
        )
        blocks = tuple(keys[: num_tokens // block_tokens])
        if not pins or len(blocks) > len(pins[-1].keys):
            pins.append(PrefixPin(num_tokens, blocks, seconds))
    return tuple(pins)


def _prefixes(
    body: ChatBody, tools: Sequence[Tool], conversation: ChatRenderer
) -> list[tuple[str, float]]:
    """Text before each breakpoint, in order. The template shows where: it is rendered with marks
    in the messages. None where it leaves some of them out, or repeats them."""
    times = [seconds for message in body.messages for _, seconds in message.breakpoints]
    if not times:
        return []
    if len(times) > MAX_BREAKPOINTS:
        message = f"a request has at most {MAX_BREAKPOINTS} cache_control, not {len(times)}"
        raise ApiError(400, message, param="messages", code="invalid_value")
    mark = make_unique_marker(message.content for message in body.messages)
    marked = [_with_marker(message, mark) for message in body.messages]
    pieces = conversation.text(body.model_copy(update={"messages": marked}), tools).split(mark)
    if len(pieces) != len(times) + 1:
        return []
    return [("".join(pieces[: index + 1]), seconds) for index, seconds in enumerate(times)]


def _with_marker(message: Message, mark: str) -> Message:
    content = message.content
    for characters, _ in reversed(message.breakpoints):
        content = content[:characters] + mark + content[characters:]
    return message.model_copy(update={"content": content})


def _common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
