"""The headers of messages in the Harmony format of gpt-oss.

<|channel|>analysis<|message|>Hm.<|end|>
<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}
"""

from dataclasses import dataclass

import regex

from router.serving.parsers.answer_tape import AnswerTape, Reading, compiled

_HEADER_MARK = compiled(r"<\|(?P<mark>message|start|end|call|return)\|>")
_RECIPIENT = regex.compile(r"\bto=([^\s<]+)")
_CHANNEL = regex.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """The content of a header: the function that the message calls, or None; whether the message is
    reasoning, and else whether it is shown. Code for a tool that the model was trained with, but
    which nobody offers, is not shown."""

    function: str | None
    is_reasoning: bool
    is_shown: bool


def read_header(tape: AnswerTape) -> Reading[HarmonyMessage | None]:
    """Read up to the beginning of a message. A header without a message is skipped. Return None at
    the end of the answer."""
    header: list[str] = []
    while True:
        found = yield from tape.until(_HEADER_MARK, header.append)
        if found is None:
            return None
        if found["mark"] == "message":
            return _parsed("".join(header))
        header.clear()


def _parsed(header: str) -> HarmonyMessage:
    recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    name = recipient[1] if recipient is not None else "assistant"
    is_function = name.startswith(_FUNCTIONS)
    is_reasoning = not is_function and channel is not None and channel[1] == "analysis"
    return HarmonyMessage(
        name.removeprefix(_FUNCTIONS) if is_function else None,
        is_reasoning and name == "assistant",
        is_function or name == "assistant",
    )
