"""Where the breakpoints of a chat (``cache_control``) lie in its prompt: tokens, and blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockKey
from baton.text.tokenizer import Tokenizer
from router.conversation import Conversation
from router.private_mark import private_mark
from router.problem import Problem
from router.schema import ChatBody, Message
from router.schema.tool import Tool

MAX_BREAKPOINTS = 4
"""Of a request, as Anthropic has it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix to be kept: its full blocks. ``num_tokens`` of the prompt are before the
    breakpoint."""

    num_tokens: int
    keys: tuple[BlockKey, ...]
    seconds: float


def pins_of(
    body: ChatBody,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    keys: Sequence[BlockKey],
    block_tokens: int,
) -> tuple[Pin, ...]:
    """The longest prefix for each time, whole blocks only: what is shorter is part of it. Raises
    Problem for too many breakpoints."""
    longest: dict[float, str] = {}
    for prefix, seconds in _prefixes(body, tools, Conversation(tokenizer)):
        longest[seconds] = prefix
    pins: list[Pin] = []
    special = bool(body.add_special_tokens)
    for seconds, prefix in sorted(longest.items(), reverse=True):
        num_tokens = _common(tokenizer.encode(prefix, add_special_tokens=special), token_ids)
        blocks = tuple(keys[: num_tokens // block_tokens])
        if not pins or len(blocks) > len(pins[-1].keys):
            pins.append(Pin(num_tokens, blocks, seconds))
    return tuple(pins)


def _prefixes(
    body: ChatBody, tools: Sequence[Tool], conversation: Conversation
) -> list[tuple[str, float]]:
    """Text before each breakpoint, in order. The template shows where: it is rendered with marks
    in the messages. None where it leaves some of them out, or repeats them."""
    times = [seconds for message in body.messages for _, seconds in message.breakpoints]
    if not times:
        return []
    if len(times) > MAX_BREAKPOINTS:
        message = f"a request has at most {MAX_BREAKPOINTS} cache_control, not {len(times)}"
        raise Problem(400, message, param="messages", code="invalid_value")
    mark = private_mark(message.content for message in body.messages)
    marked = [_marked(message, mark) for message in body.messages]
    pieces = conversation.text(body.model_copy(update={"messages": marked}), tools).split(mark)
    if len(pieces) != len(times) + 1:
        return []
    return [("".join(pieces[: index + 1]), seconds) for index, seconds in enumerate(times)]


def _marked(message: Message, mark: str) -> Message:
    content = message.content
    for characters, _ in reversed(message.breakpoints):
        content = content[:characters] + mark + content[characters:]
    return message.model_copy(update={"content": content})


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
