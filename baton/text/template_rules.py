"""Finds out which messages a chat template takes.

Templates refuse or leave out different things: a second system message, a role that they don't
know, two turns of one role, arguments that are not an object. The words in a template don't tell.
So :func:`find_rules` renders small conversations, in which each message has a text of its own, and
looks which texts are in the prompt."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

from baton.errors import Invalid

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The keys of a message under which templates read reasoning."""

CONTENT = "content"


@dataclass(frozen=True, slots=True)
class TemplateRules:
    """The messages that a chat template takes: by default, all but those of the role ``developer``.

    - ``takes_text``: content as text, not only as a list of parts.
    - ``takes_system_at_any_end``: a system message in a chat whose last message is not the user's.
    - ``takes_only_system``: a chat of one system message; ``takes_no_user``: any other chat without
      a message of the user.
    - ``takes_system_pair``: two system messages at the beginning; ``takes_late_system``: a system
      message after messages of other roles; ``takes_another_system``: the same, after a system
      message at the beginning.
    - ``takes_user_pair``, ``takes_assistant_pair``: two adjacent messages of the role.
    - ``takes_calls``: tool calls; ``takes_results``: the role ``tool``.
    - ``takes_user_after_result``: a message of the user after a tool's result.
    - ``takes_objects``, ``takes_json``: a call's arguments as an object, as JSON text.
    - ``takes_foreign_ids``: ids of calls that are not nine letters and digits.
    - ``takes_parallel_calls``: two calls in one message; ``takes_text_beside_call``: a call and
      content in one message; ``takes_empty_text_beside_call``: the same with empty content, instead
      of none.
    - ``reasoning_key``: the key under which the template reads reasoning. It is ``content`` if the
      template separates reasoning in ``<think>`` and ``</think>`` from the rest of the content, and
      None if it reads no reasoning.
    - ``takes_text_beside_reasoning``: content and reasoning in a message with calls."""

    takes_text: bool = True
    takes_system: bool = True
    takes_developer: bool = False
    takes_system_at_any_end: bool = True
    takes_only_system: bool = True
    takes_no_user: bool = True
    takes_system_pair: bool = True
    takes_late_system: bool = True
    takes_another_system: bool = True
    takes_user_pair: bool = True
    takes_assistant_pair: bool = True
    takes_assistant_first: bool = True
    takes_calls: bool = True
    takes_results: bool = True
    takes_user_after_result: bool = True
    takes_objects: bool = True
    takes_json: bool = True
    takes_foreign_ids: bool = True
    takes_parallel_calls: bool = True
    takes_text_beside_call: bool = True
    takes_empty_text_beside_call: bool = True
    reasoning_key: str | None = None
    takes_text_beside_reasoning: bool = True

    def takes_pair(self, role: str) -> bool:
        """Return whether the template takes two adjacent messages of a role other than
        ``system``."""
        pairs = {"user": self.takes_user_pair, "assistant": self.takes_assistant_pair}
        return pairs.get(role, True)


PAIR = "system system user"
LATE = ("user system", "user assistant system user")
ANOTHER = ("system user system", "system user assistant system user")
"""Conversations with system messages; a template takes all of a group or is treated as if it took
none."""


def find_rules(render: Render) -> TemplateRules | None:
    """Find the rules of a template. ``render`` returns the prompt that messages become, or raises
    Invalid; it is called some 60 times. Returns None if the template does not even show a message
    of the user, so that nothing can be found."""
    if _Probe(render).shows("user"):
        return _find_rules(render)

    def render_parts(messages: Sequence[Message]) -> str:
        return render([in_parts(message) for message in messages])

    if _Probe(render_parts).shows("user"):
        return replace(_find_rules(render_parts), takes_text=False)
    return None


def in_parts(message: Message) -> Message:
    """Return a message whose content is a list with one part of type ``text``."""
    return {**message, "content": [{"type": "text", "text": message["content"] or ""}]}


def _find_rules(render: Render) -> TemplateRules:
    probe = _Probe(render)
    takes_system = probe.shows("system user")
    form = _find_call_form(render)
    return TemplateRules(
        takes_system=takes_system,
        takes_developer=_takes_developer(probe),
        takes_system_at_any_end=probe.shows("system user assistant")
        and (form is None or form.shows("system user call result")),
        takes_only_system=probe.shows("system"),
        takes_no_user=probe.shows("system assistant" if takes_system else "assistant"),
        takes_system_pair=probe.shows(PAIR),
        takes_late_system=all(map(probe.shows, LATE)),
        takes_another_system=all(map(probe.shows, ANOTHER)),
        takes_user_pair=probe.shows("user user"),
        takes_assistant_pair=probe.shows("user assistant assistant user"),
        takes_assistant_first=probe.shows("assistant user"),
        **(_call_rules(form) if form is not None else _rules_without_calls(probe)),
        **_reasoning_rules(form or probe),
    )


def short_id(call_id: str) -> str:
    """Return a call's id if it consists of nine letters and digits, else nine digits of its
    digest."""
    if re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(errors="replace")).hexdigest()[:9]


CALL_NAME = "probe_call"


@dataclass(frozen=True, slots=True)
class _Probe:
    """Renders conversations, which are written as the roles of their messages: ``call`` is a call
    of the assistant, ``calls`` are two calls in one message, ``result`` is the result of the first
    call that has none yet, ``text+call`` is a text and a call in one message, and ``empty`` is an
    empty message of the assistant."""

    render: Render
    has_objects: bool = True
    has_short_ids: bool = False
    has_null_content: bool = False

    def shows(self, roles: str) -> bool:
        """Return whether the prompt has the texts of all messages."""
        messages = self.conversation(roles)
        prompt = self.prompt(messages)
        return prompt is not None and all(text in prompt for text in _texts_in(messages))

    def prompt(self, messages: Sequence[Message]) -> str | None:
        """Return the prompt, or None if the template refuses the messages."""
        try:
            return self.render(messages)
        except Invalid:
            return None

    def conversation(self, roles: str) -> list[dict[str, Any]]:
        numbers = count()
        ids: list[str] = []
        return [self._message(role, numbers, ids) for role in roles.split()]

    def _message(self, role: str, numbers: Iterator[int], ids: list[str]) -> dict[str, Any]:
        """``ids`` are those of the calls that have no result yet."""
        if role in ("call", "calls", "text+call"):
            calls = [self._call(next(numbers)) for _ in range(1 + (role == "calls"))]
            ids += [call["id"] for call in calls]
            empty = None if self.has_null_content else ""
            content = _text(next(numbers)) if role == "text+call" else empty
            return {"role": "assistant", "content": content, "tool_calls": calls}
        if role == "empty":
            return {"role": "assistant", "content": ""}
        content = _text(next(numbers))
        if role == "result":
            call_id = ids.pop(0) if ids else "call_0"
            return {"role": "tool", "tool_call_id": call_id, "content": content}
        return {"role": role, "content": content}

    def _call(self, number: int) -> dict[str, Any]:
        arguments = {"value": _text(number)}
        # An id as Baton and OpenAI make them
        call_id = f"call_{number:024}"
        return {
            "id": short_id(call_id) if self.has_short_ids else call_id,
            "type": "function",
            "function": {
                "name": CALL_NAME,
                "arguments": arguments if self.has_objects else json.dumps(arguments),
            },
        }


def _text(number: int) -> str:
    return f"probe{number:03}text"


def _texts_in(messages: Sequence[Message]) -> list[str]:
    return re.findall(r"probe\d{3}text", json.dumps(messages))


def _takes_developer(probe: _Probe) -> bool:
    """Return whether the template knows the role ``developer``, and takes it wherever it takes
    ``system``.
    A template does not know the role if it only writes its name, as it would write any name."""
    unknown = "unknown-role"
    prompt = probe.prompt(probe.conversation("developer user"))
    other = probe.prompt(probe.conversation(f"{unknown} user"))
    if prompt is None or (
        other is not None and other.lower().replace(unknown, "developer") == prompt.lower()
    ):
        return False
    return probe.shows("developer user") and all(
        probe.shows("developer".join(chat.rsplit("system", 1))) or not probe.shows(chat)
        for chat in (PAIR, *LATE, *ANOTHER)
    )


# -- calls ----------------------------------------------------------------------------------------


def _find_call_form(render: Render) -> _Probe | None:
    """Return a probe whose calls the template shows, together with their results; None if there is
    none. Calls as most templates take them are preferred."""
    forms = product((False, True), (False, True), (True, False))
    probes = (
        _Probe(render, has_objects, has_short_ids, has_null_content)
        for has_null_content, has_short_ids, has_objects in forms
    )
    return next((probe for probe in probes if probe.shows("user call result")), None)


def _call_rules(form: _Probe) -> dict[str, Any]:
    """Return the rules about calls. The template shows calls of the form ``form``. What no change
    of the messages mends is not a rule."""
    shows = form.shows
    takes_json = replace(form, has_objects=False).shows("user call result")
    return {
        "takes_objects": form.has_objects and not (takes_json and _writes_python(form)),
        "takes_json": takes_json,
        "takes_foreign_ids": not form.has_short_ids,
        "takes_empty_text_beside_call": not form.has_null_content,
        "takes_parallel_calls": shows("user calls result result")
        or not shows("user call result call result"),
        "takes_text_beside_call": shows("user text+call result")
        or not shows("user assistant call result assistant user"),
        "takes_user_after_result": shows("user call result user")
        or not shows("user call result empty user"),
    }


def _writes_python(form: _Probe) -> bool:
    """Return whether the template writes an object as Python does, because it expects JSON text."""
    prompt = form.prompt(form.conversation("user call result"))
    return prompt is not None and str({"value": _text(1)}) in prompt


def _rules_without_calls(probe: _Probe) -> dict[str, Any]:
    """Return the rules of a template that does not show arguments of calls. If it at least shows
    their names, it is left alone."""
    prompt = probe.prompt(probe.conversation("user call result"))
    takes_calls = prompt is not None and CALL_NAME in prompt
    return {
        "takes_calls": takes_calls,
        "takes_results": takes_calls or probe.shows("user assistant result"),
    }


# -- reasoning ------------------------------------------------------------------------------------

REASONING = "probe-reasoning"


def _reasoning_rules(form: _Probe) -> dict[str, Any]:
    for key, has_call in product(REASONING_KEYS, (True, False)):
        prompt = form.prompt(_reasoning_chat(form, has_call, {key: REASONING}))
        if prompt is not None and REASONING in prompt:
            both = _reasoning_chat(form, has_call, {key: REASONING, CONTENT: "text"})
            return {
                "reasoning_key": key,
                "takes_text_beside_reasoning": form.prompt(both) is not None,
            }
    return {"reasoning_key": CONTENT if _separates_reasoning(form) else None}


def _reasoning_chat(form: _Probe, has_call: bool, fields: Message) -> list[Message]:
    """Return a chat with an assistant's message that has the fields ``fields``: a call after the
    last question, or else an answer before it. Templates leave out the reasoning of some."""
    chat = form.conversation("user call result" if has_call else "user assistant user")
    return [chat[0], {**chat[1], **fields}, chat[2]]


def _separates_reasoning(form: _Probe) -> bool:
    """Return whether the template finds reasoning in the content and writes it in its own form: the
    odd blanks around it are not in the prompt."""
    answer = "probe-answer"
    content = f"<think>\n \n{REASONING}\n \n</think>\n \n{answer}"
    prompts = [
        form.prompt(_reasoning_chat(form, has_call, {CONTENT: content}))
        for has_call in (True, False)
    ]
    shown = [prompt for prompt in prompts if prompt is not None and answer in prompt]
    is_read = any(REASONING in prompt for prompt in shown)
    return is_read and all(content not in prompt for prompt in shown)
