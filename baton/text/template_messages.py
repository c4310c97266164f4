"""Fits the messages of a chat to its chat template."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.text.template_rules import (
    CONTENT,
    REASONING_KEYS,
    Message,
    TemplateRules,
    in_parts,
    short_id,
)

PARAGRAPH = "\n\n"
"""Separates the texts of messages that become one message."""

SYSTEM_ROLES = ("system", "developer")

REASONING_KEY = REASONING_KEYS[0]
"""The key of reasoning in the messages that :func:`fit_messages` gets."""

INVALID_ARGUMENTS = "invalid_arguments"
"""The name of the one argument of a call whose arguments are not a JSON object, for templates that
take only objects. Its value is the text of the arguments."""


def fit_messages(messages: Sequence[Message], rules: TemplateRules) -> list[Message]:
    """Return messages that the template takes, with all texts of ``messages``. Only what the
    template would refuse or leave out is changed:

    - The role ``developer`` becomes ``system``.
    - System messages at the beginning become one. A later one becomes part of the user's turn at
      its place, so that the prompt before it, which may be in a cache, stays the same. So does each
      system message if the template has none, or none in a chat like this one.
    - Adjacent messages of the user or of the assistant become one.
    - An empty message of the user is put before an assistant's message at the beginning, and an
      empty one of the assistant between a tool's result and a message of the user.
    - A text beside calls becomes a message before them, and each of several calls in one message
      becomes a message, which its result follows. If the template has no calls, they become JSON in
      the text; results become messages of the user if it has no results.
    - Content, arguments, ids of calls and reasoning get the form that the template takes.
    """
    fitted = [_fit_message(message, number, rules) for number, message in enumerate(messages)]
    if not (rules.takes_text_beside_call and rules.takes_empty_text_beside_call):
        fitted = [part for message in fitted for part in _split_text(message, rules)]
    if not rules.takes_parallel_calls:
        fitted = list(_split_calls(fitted))
    fitted = list(_fill_gaps([_join(turn) for turn in _find_turns(fitted, rules)], rules))
    return fitted if rules.takes_text else [in_parts(message) for message in fitted]


# -- single messages ------------------------------------------------------------------------------


def _fit_message(message: Message, number: int, rules: TemplateRules) -> Message:
    if message["role"] == "developer" and not rules.takes_developer:
        return {**message, "role": "system"}
    if message["role"] == "tool" and not rules.takes_results:
        return {"role": "user", "content": message["content"]}
    if message["role"] == "tool" and not rules.takes_foreign_ids:
        return {**message, "tool_call_id": short_id(message.get("tool_call_id") or "")}
    calls = message.get("tool_calls")
    if calls and rules.takes_calls:
        fitted = [_fit_call(call, f"{number}/{index}", rules) for index, call in enumerate(calls)]
        message = {**message, "tool_calls": fitted}
    elif calls:
        message = _with_calls_in_text(message)
    return _fit_reasoning(message, rules) if message.get(REASONING_KEY) else message


def _fit_call(call: Mapping[str, Any], place: str, rules: TemplateRules) -> Mapping[str, Any]:
    """Return a call with arguments and an id that the template takes. ``place`` is unique in the
    chat; a call without an id gets one that is made from it."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str) and not rules.takes_json:
        arguments = _to_object(arguments)
    elif isinstance(arguments, dict) and not rules.takes_objects:
        arguments = json.dumps(arguments, ensure_ascii=False)
    call = {**call, "function": {**function, "arguments": arguments}}
    return call if rules.takes_foreign_ids else {**call, "id": short_id(call.get("id") or place)}


def _to_object(arguments: str) -> dict[str, Any]:
    """Return an object for a call's arguments that are not the JSON text of one. Models write line
    breaks into strings without escaping them, blank text or null for no arguments, and
    ``max_tokens`` cuts arguments off."""
    try:
        value = json.loads(arguments, strict=False) if arguments.strip() else None
    except (ValueError, RecursionError):
        value = arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) else {INVALID_ARGUMENTS: arguments}


def _with_calls_in_text(message: Message) -> Message:
    """Return a message with its calls as JSON in its text, a line for each."""
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    functions = [call["function"] for call in message["tool_calls"]]
    lines = [
        json.dumps({key: each[key] for key in ("name", "arguments")}, ensure_ascii=False)
        for each in functions
    ]
    texts = [message["content"], "\n".join(lines)]
    return {**rest, "content": PARAGRAPH.join(text for text in texts if text)}


def _fit_reasoning(message: Message, rules: TemplateRules) -> Message:
    """Move a message's reasoning to where the template reads it. If the template refuses a text
    beside it, the text follows it there."""
    key, content, reasoning = rules.reasoning_key, message["content"], message[REASONING_KEY]
    if key is None:
        return message
    rest = {name: value for name, value in message.items() if name != REASONING_KEY}
    if key == CONTENT:
        return {**rest, "content": f"<think>\n{reasoning}\n</think>\n\n{content}"}
    if content and message.get("tool_calls") and not rules.takes_text_beside_reasoning:
        return {**rest, "content": "", key: f"{reasoning}{PARAGRAPH}{content}"}
    return {**rest, key: reasoning}


# -- turns ----------------------------------------------------------------------------------------


def _split_text(message: Message, rules: TemplateRules) -> Iterator[Message]:
    """Yield a message's text as a message of its own before its calls. The message with the calls
    has empty content, or None if the template shows calls only then."""
    if message.get("tool_calls"):
        if message["content"]:
            yield {"role": message["role"], "content": message["content"]}
        message = {**message, "content": "" if rules.takes_empty_text_beside_call else None}
    yield message


def _split_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield a message for each call, and after it the results of the call. Results that belong to
    none of the calls before them come last."""
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results: dict[str | None, list[Message]] = defaultdict(list)
        while position < len(messages) and messages[position]["role"] == "tool":
            results[messages[position].get("tool_call_id")].append(messages[position])
            position += 1
        for call in calls:
            yield {**message, "tool_calls": [call]}
            yield from results.pop(call.get("id"), ())
            message = {"role": "assistant", "content": ""}
        for others in results.values():
            yield from others


def _find_turns(messages: Sequence[Message], rules: TemplateRules) -> list[list[Message]]:
    """Return the messages in groups; those of a group become one message."""
    turns: list[list[Message]] = []
    was_folded = False
    for message, is_folded in zip(messages, _find_folded(messages, rules), strict=True):
        if is_folded:
            message = {**message, "role": "user"}
        role = message["role"]
        last_role = turns[-1][-1]["role"] if turns else ""
        joins_user = last_role == role == "user" and (is_folded or was_folded)
        if joins_user or _may_not_follow(last_role, role, rules):
            turns[-1].append(message)
        else:
            turns.append([message])
        was_folded = is_folded
    return turns


def _find_folded(messages: Sequence[Message], rules: TemplateRules) -> Iterator[bool]:
    """Yield whether each message is a system message that becomes part of the user's turn."""
    num_system = sum(message["role"] in SYSTEM_ROLES for message in messages)
    ends_with_user = bool(messages) and messages[-1]["role"] == "user"
    takes_system = (
        rules.takes_system
        and (rules.takes_system_at_any_end or ends_with_user or num_system == len(messages))
        and (rules.takes_only_system or num_system < len(messages))
    )
    last_role = ""
    for message, next_role in zip(messages, _next_roles(messages), strict=True):
        role = message["role"]
        if role not in SYSTEM_ROLES:
            last_role = role
            yield False
        elif not last_role:
            yield not takes_system
        else:
            takes_late = rules.takes_another_system if num_system > 1 else rules.takes_late_system
            # Without it, the messages before and after it would be adjacent.
            divides_pair = last_role == next_role and not rules.takes_pair(last_role)
            yield not (takes_system and takes_late) or divides_pair


def _next_roles(messages: Sequence[Message]) -> list[str]:
    """Return, for each message, the role of the next one that is not a system message; empty if
    there is none."""
    roles = []
    role = ""
    for message in reversed(messages):
        roles.append(role)
        role = role if message["role"] in SYSTEM_ROLES else message["role"]
    return roles[::-1]


def _may_not_follow(last_role: str, role: str, rules: TemplateRules) -> bool:
    """Return whether a message of this role can't follow one of the same role."""
    if role in SYSTEM_ROLES:
        return last_role in SYSTEM_ROLES and not rules.takes_system_pair
    return last_role == role and not rules.takes_pair(role)


def _join(turn: Sequence[Message]) -> Message:
    """Make one message of several. It has the first one's role."""
    if len(turn) == 1:
        return turn[0]
    joined = dict(turn[0])
    for key in ("content", *REASONING_KEYS):
        texts = [text for message in turn if (text := message.get(key))]
        if texts:
            joined[key] = PARAGRAPH.join(texts)
    calls = [call for message in turn for call in message.get("tool_calls") or ()]
    return {**joined, "tool_calls": calls} if calls else joined


def _fill_gaps(messages: Sequence[Message], rules: TemplateRules) -> Iterator[Message]:
    """Yield the messages, and empty ones where the template needs a message."""
    has_user = any(message["role"] == "user" for message in messages)
    needs_user = not (rules.takes_assistant_first and (has_user or rules.takes_no_user))
    last_role = None
    for message in messages:
        role = message["role"]
        if needs_user and role not in SYSTEM_ROLES:
            needs_user = False
            if role != "user":
                yield {"role": "user", "content": ""}
        if last_role == "tool" and role == "user" and not rules.takes_user_after_result:
            yield {"role": "assistant", "content": ""}
        yield message
        last_role = role
