"""Decodes objects that typed Go clients send as protobuf.

Only the kinds that Helm and Baton's tools send as protobuf are known. Field numbers are those in
Kubernetes' ``generated.proto`` files.
"""

import base64
from collections.abc import Callable, Iterator
from typing import Any

from tests.kube.failures import Refused
from tests.kube.kinds import Object

MAGIC = b"k8s\0"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

Reader = Callable[[Any], Any]
Message = dict[int, tuple[str, Reader, bool]]
"""Maps a field number to (name, decoder of its value, whether the field is repeated)."""


def decode_object(body: bytes) -> Object:
    """Decode an object from an envelope, which begins with MAGIC. Raises Refused (415) for an
    unknown kind."""
    envelope = dict(_fields(body[len(MAGIC) :]))
    about = dict(_fields(envelope[1]))
    api_version, kind = about[1].decode(), about[2].decode()
    if kind not in KINDS:
        message = f"this server can't decode a {api_version} {kind} from protobuf"
        raise Refused(415, "UnsupportedMediaType", message)
    return {"apiVersion": api_version, "kind": kind, **_message(envelope[2], KINDS[kind])}


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not data[place - 1] & 0x80:
            return value, place


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == VARINT:
            value: Any
            value, place = _varint(data, place)
        else:
            if wire_type == BYTES:
                length, place = _varint(data, place)
            else:
                length = {FIXED64: 8, FIXED32: 4}[wire_type]
            value, place = data[place : place + length], place + length
        yield number, value


def _message(data: bytes, message: Message) -> Object:
    out: Object = {}
    for number, raw in _fields(data):
        if number not in message:
            continue
        name, read, several = message[number]
        value = read(raw)
        if isinstance(value, dict) and isinstance(out.get(name), dict):
            out[name] |= value  # an entry of a map
        elif several:
            out.setdefault(name, []).append(value)
        elif value not in ("", {}):
            out[name] = value
    return out


def _text(raw: bytes) -> str:
    return raw.decode()


def _encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _map(read: Reader) -> Reader:
    def entry(raw: bytes) -> Object:
        pair = dict(_fields(raw))
        return {pair[1].decode(): read(pair.get(2, b""))}

    return entry


def _inner(message: Message) -> Reader:
    return lambda raw: _message(raw, message)


OWNER: Message = {
    1: ("kind", _text, False),
    3: ("name", _text, False),
    4: ("uid", _text, False),
    5: ("apiVersion", _text, False),
    6: ("controller", bool, False),
    7: ("blockOwnerDeletion", bool, False),
}
METADATA: Message = {
    1: ("name", _text, False),
    2: ("generateName", _text, False),
    3: ("namespace", _text, False),
    5: ("uid", _text, False),
    6: ("resourceVersion", _text, False),
    11: ("labels", _map(_text), False),
    12: ("annotations", _map(_text), False),
    13: ("ownerReferences", _inner(OWNER), True),
    14: ("finalizers", _text, True),
}
KINDS: dict[str, Message] = {
    "Secret": {
        1: ("metadata", _inner(METADATA), False),
        2: ("data", _map(_encoded), False),
        3: ("type", _text, False),
        4: ("stringData", _map(_text), False),
        5: ("immutable", bool, False),
    },
    "ConfigMap": {
        1: ("metadata", _inner(METADATA), False),
        2: ("data", _map(_text), False),
        3: ("binaryData", _map(_encoded), False),
        4: ("immutable", bool, False),
    },
    "Namespace": {1: ("metadata", _inner(METADATA), False)},
    "DeleteOptions": {
        1: ("gracePeriodSeconds", int, False),
        4: ("propagationPolicy", _text, False),
        5: ("dryRun", _text, True),
    },
}
