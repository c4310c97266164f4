"""The body of a request that is forwarded: what Baton reads in it, and what it changes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import orjson

from baton.core.block_key import BLOCK_KEY_BYTES
from baton.core.ids import BlockKey
from baton.core.server_api import CHATS, hashed_salt
from router.errors import ApiError, invalid_field, not_json
from router.http.json_limits import check_json_size
from router.http.multipart import MultipartParser, parse_boundary
from router.http.nesting import is_nested_deeper
from router.http.response_writer import JSON_TYPE
from router.limits import MAX_CHOICES, MAX_FORWARDED_KEYS
from router.serving.schema.message import MEDIA_TYPES
from router.serving.schema.strict_model import to_integer
from router.tenants.admission import DEFAULT_RESERVED_OUTPUT_TOKENS

_MEDIA_MARKS = tuple(f'"{kind}"'.encode() for kind in sorted(MEDIA_TYPES))

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""Fields that are refused, since whoever has them can read what others have on the server."""

EXTRA_FIELD = "vllm_xargs"
"""A field whose own fields get to the engine beside those of the transfers, under their names."""

REPLACED_FIELDS = ("cache_salt", "priority", "request_id", "session_id")
"""Fields that have a meaning for all clients of a server together, so Baton sets them itself, or
not at all."""

CHARACTERS_PER_TOKEN = 4
_NOT_IN_NAMES = re.compile(r'[\x00-\x1f\x7f"\\]')
"""Characters that parsers of forms read differently within a name."""

EncodeBody = Callable[[str, bytes], bytes]


@dataclass(frozen=True, slots=True)
class ForwardedBody:
    """``num_tokens`` is an estimate, in which images, audio and forms count nothing.
    ``answer_tokens`` is the most that each of ``num_choices`` answers may have. ``drops_usage``
    says that the client did not ask for the event with the usage, which the server is asked for.
    ``parts`` are those of a chat, as bytes. ``encode`` returns the body for a server, given its
    name for the model and the salt of the tenant's prefixes; it has ``content_type``."""

    encode: EncodeBody
    content_type: str = JSON_TYPE
    model: str | None = None
    num_tokens: int = 0
    answer_tokens: int = 0
    num_choices: int = 1
    drops_usage: bool = False
    cache_salt: str | None = None
    cache_key: str | None = None
    parts: Sequence[bytes] = ()

    def prefix_keys(self, root: bytes) -> tuple[BlockKey, ...]:
        """Return a key for each part of a chat, which depends on all parts up to it, so that chats
        with the same beginning are placed alike. ``root`` is what else their caches depend on."""
        key, keys = root, []
        for part in self.parts[:MAX_FORWARDED_KEYS]:
            key = blake2b(key + part, digest_size=BLOCK_KEY_BYTES).digest()
            keys.append(BlockKey(key))
        return tuple(keys)


def read_json(data: bytes, max_values: int) -> dict[str, Any]:
    """Parse a body. Raises ApiError (400) unless it is an object of a bearable size."""
    check_json_size(data, max_values)
    try:
        body = orjson.loads(data)
    except ValueError as error:
        raise ApiError(400, not_json("the body", error), code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if is_nested_deeper(body):
        raise ApiError(400, "the body is nested too deeply", code="invalid_json")
    return body


def may_have_media(data: bytes | bytearray) -> bool:
    """Whether a chat, which is not parsed yet, may have parts that only a server understands."""
    return any(mark in data for mark in _MEDIA_MARKS)


def has_media(body: Mapping[str, Any]) -> bool:
    """Whether a message of a chat has a part that only a server understands."""
    messages = body.get("messages")
    return isinstance(messages, list) and any(
        isinstance(part, dict) and _is_media(part) for _role, part in _chat_parts(messages)
    )


def _is_media(part: Mapping[str, Any]) -> bool:
    """Whether a server takes a part for an image, audio or video: it may have no type."""
    kind = part.get("type")
    return (isinstance(kind, str) and kind in MEDIA_TYPES) or not MEDIA_TYPES.isdisjoint(part)


def parse_json(body: dict[str, Any], path: str) -> ForwardedBody:
    """Read a JSON body, which is changed. Raises ApiError (400)."""
    extra = body.get(EXTRA_FIELD)
    for fields_of in (body, extra if isinstance(extra, dict) else {}):
        for name in TRANSFER_FIELDS:
            if fields_of.pop(name, None):
                raise _transfer_refused(name)
    if _has_uuid(body):
        raise invalid_field("uuid", "uuid is not supported: send each image, audio or video whole")
    given = {name: body.pop(name, None) for name in REPLACED_FIELDS}
    fields = ForwardedBody(
        partial(_encode_json, body),
        model=_text(body, "model"),
        num_tokens=_count_tokens(body),
        cache_salt=_text(given, "cache_salt"),
    )
    return fields if path != CHATS else _add_chat(fields, body)


def _has_uuid(value: Any) -> bool:
    """Whether a JSON value has an image, audio or video with a ``uuid``, under which a server keeps
    it for all of its clients."""
    if isinstance(value, list):
        return any(_has_uuid(each) for each in value if isinstance(each, (dict, list)))
    if not isinstance(value, dict):
        return False
    if value.get("uuid") is not None and _is_media(value):
        return True
    return any(map(_has_uuid, value.values()))


def _add_chat(fields: ForwardedBody, body: dict[str, Any]) -> ForwardedBody:
    """Add what is read of a chat. A stream is asked for its usage. Raises ApiError (400) for values
    that a server would convert, such as the number "7": it must not read another one."""
    stream, num_choices, drops_usage = body.get("stream"), _integer(body, "n") or 1, False
    if not isinstance(stream, bool | None):
        raise invalid_field("stream", "stream must be true or false")
    if num_choices > MAX_CHOICES:
        raise invalid_field("n", f"n is {num_choices}; it must be at most {MAX_CHOICES}")
    answer_tokens = _integer(body, "max_completion_tokens") or _integer(body, "max_tokens")
    if stream:
        given = body.get("stream_options")
        options = given if isinstance(given, dict) else {}
        drops_usage = not options.get("include_usage")
        body["stream_options"] = options | {"include_usage": True}
    return replace(
        fields,
        answer_tokens=answer_tokens or DEFAULT_RESERVED_OUTPUT_TOKENS,
        num_choices=num_choices,
        drops_usage=drops_usage,
        cache_key=_text(body, "prompt_cache_key"),
        parts=[orjson.dumps(part) for part in _chat_parts(body["messages"])],
    )


def _chat_parts(messages: Sequence[Any]) -> list[Any]:
    """Return the parts of all messages, each with the role of its message."""
    parts: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        role = message.get("role") if isinstance(message, dict) else None
        parts += [(role, part) for part in (content if isinstance(content, list) else [content])]
    return parts


def _encode_json(body: Mapping[str, Any], model: str, salt: bytes) -> bytes:
    salted = {"cache_salt": hashed_salt(salt)} if salt else {}
    return orjson.dumps({**body, **salted, "model": model})


def _count_tokens(value: Any) -> int:
    """Estimate the tokens in a JSON value: of texts and lists of token ids."""
    if isinstance(value, str):
        return -(-len(value) // CHARACTERS_PER_TOKEN)
    if isinstance(value, list):
        return sum(map(_count_tokens, value))
    if isinstance(value, dict):
        return sum(_count_tokens(each) for key, each in value.items() if key not in MEDIA_TYPES)
    return int(isinstance(value, int) and not isinstance(value, bool))


def parse_form(data: bytes, content_type: str) -> ForwardedBody:
    """Read a multipart form. Raises ApiError (400, 415). The server gets one that is written anew
    from what was read, with a boundary that its values can't contain: it might read a part, or the
    boundary, of the client's form in another way."""
    file = _File()
    parser = MultipartParser(parse_boundary(content_type), lambda _filename: file)
    parser.push(data)
    parser.close()
    texts = [(_safe_name(name), value) for name, value in parser.texts]
    fields = dict(texts)
    for name in TRANSFER_FIELDS:
        if name in fields:
            raise _transfer_refused(name)
    boundary = blake2b(data, digest_size=16).hexdigest()
    parts = [(f'"{name}"', text.encode()) for name, text in texts if name != "model"]
    if parser.filename is not None:
        parts.append((f'"file"; filename="{_safe_name(parser.filename)}"', b"".join(file.pieces)))
    return ForwardedBody(
        partial(_encode_form, parts, boundary.encode()),
        f"multipart/form-data; boundary={boundary}",
        fields.get("model"),
    )


@dataclass(slots=True)
class _File:
    pieces: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        self.pieces.append(data)


def _safe_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)


def _encode_form(
    parts: Sequence[tuple[str, bytes]], boundary: bytes, model: str, salt: bytes
) -> bytes:
    """Encode a form that names the model as the server does. A form has no place for a salt."""
    encoded = [
        b"--%b\r\ncontent-disposition: form-data; name=%b\r\n\r\n%b\r\n"
        % (boundary, name.encode(), value)
        for name, value in [*parts, ('"model"', model.encode())]
    ]
    return b"".join([*encoded, b"--%b--\r\n" % boundary])


def _transfer_refused(name: str) -> ApiError:
    return invalid_field(name, f"{name} is not supported: only workers transfer what is cached")


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid_field(name, f"{name} must be a string")
    return value


def _integer(body: Mapping[str, Any], name: str) -> int:
    """Return a number of a body, or 0 if it is not positive, which the server refuses."""
    value = to_integer(body.get(name))
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise invalid_field(name, f"{name} must be an integer")
    return max(value or 0, 0)
