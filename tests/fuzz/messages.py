"""Generates random protobuf messages from descriptors or examples, and corrupts their encodings."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MAX_DEPTH = 4
MAX_REPEATED = 5

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    "a",
    "x" * 300,
    "\x00",
    "ü\U0001f600",
    "../../etc/passwd",
    "127.0.0.1:1",
    "memory",
    "r",
)
_BYTES = (b"", b"\x00", b"\xff" * 16, bytes(16), b"\x01" * 15, b"\x80" * 300)


class MessageMaker:
    """Generates messages with a seeded random generator. If ``examples`` has messages of the wanted
    type, most results are copies of them with a few changes, so that they are nearly valid."""

    def __init__(self, chance: np.random.Generator, examples: Sequence[Message] = ()) -> None:
        self._chance = chance
        self._examples: dict[type[Message], list[Message]] = {}
        for example in examples:
            self._examples.setdefault(type(example), []).append(example)

    def message(self, kind: type[Message]) -> Message:
        """Return an encodable message whose fields have random values of their types."""
        examples = self._examples.get(kind)
        if examples and self._happens(0.7):
            message = kind()
            message.CopyFrom(self._pick(examples))
            for _ in range(int(self._chance.integers(0, 3))):
                self._change(message)
            return message
        message = kind()
        self._fill(message, 0)
        return message

    def encode(self, kind: type[Message]) -> bytes:
        """Return an encoded message, which may be corrupt, truncated, doubled, or have unknown
        fields."""
        data = bytearray(self.message(kind).SerializeToString())
        if self._happens(0.55):
            return bytes(data)
        for _ in range(int(self._chance.integers(1, 4))):
            self._damage(data)
        return bytes(data)

    def _damage(self, data: bytearray) -> None:
        at = int(self._chance.integers(0, len(data) + 1))
        match int(self._chance.integers(0, 6)):
            case 0 if data:
                data[at % len(data)] ^= 1 << int(self._chance.integers(0, 8))
            case 1:
                del data[at:]
            case 2:
                data[at:at] = self._chance.bytes(int(self._chance.integers(1, 9)))
            case 3:
                data += data[: 1 << 16]
            case 4:  # an unknown field, of any wire type
                number, wire_type = int(self._chance.integers(500, 600)), self._pick((0, 1, 2, 5))
                payload = {0: b"\x01", 1: bytes(8), 2: b"\x03abc", 5: bytes(4)}[wire_type]
                data += _varint(number << 3 | wire_type) + payload
            case 5:  # text that is not UTF-8
                number = int(self._chance.integers(1, 20))
                data += _varint(number << 3 | 2) + b"\x02\xff\xfe"

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self._happens(0.6):
                self._set(message, field, depth)

    def _change(self, message: Message) -> None:
        """Change one field of ``message`` or of a nested message."""
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self._pick(fields)
        inner = field.message_type is not None and not field.is_repeated
        if inner and message.HasField(field.name) and self._happens(0.8):
            self._change(getattr(message, field.name))
        elif self._happens(0.2):
            message.ClearField(field.name)
        else:
            message.ClearField(field.name)
            self._set(message, field, 1)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and depth >= MAX_DEPTH:
            return
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._set_map(message, field)
        elif field.is_repeated:
            for _ in range(int(self._chance.integers(0, MAX_REPEATED))):
                if field.message_type is not None:
                    self._fill(getattr(message, field.name).add(), depth + 1)
                else:
                    getattr(message, field.name).append(self._value(field))
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            self._fill(inner, depth + 1)
        else:
            setattr(message, field.name, self._value(field))

    def _set_map(self, message: Message, field: FieldDescriptor) -> None:
        assert field.message_type is not None
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        entries = getattr(message, field.name)
        for _ in range(int(self._chance.integers(0, MAX_REPEATED))):
            if value.message_type is not None:
                self._fill(entries[self._value(key)], MAX_DEPTH)
            else:
                entries[self._value(key)] = self._value(value)

    def _value(self, field: FieldDescriptor) -> Any:
        kind = field.cpp_type
        if kind in _INTEGERS:
            return self._integer(*_INTEGERS[kind])
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return self._pick(_FLOATS) if self._happens(0.7) else float(self._chance.normal())
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self._happens(0.5)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return int(self._chance.integers(0, 12)) if self._happens(0.8) else 2**31 - 1
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._pick(_BYTES)
        return self._pick(_TEXTS)

    def _integer(self, low: int, high: int) -> int:
        if self._happens(0.6):
            return int(self._chance.integers(0, 40))
        edges = (low, high, high - 1, max(low, -1), 1, 255, 256, 65_536, 2**31 - 1)
        return int(self._pick(edges))

    def _happens(self, likelihood: float) -> bool:
        return bool(self._chance.random() < likelihood)

    def _pick(self, values: Sequence[Any]) -> Any:
        return values[int(self._chance.integers(0, len(values)))]


def is_readable(kind: type[Message], data: bytes) -> bool:
    """Return whether the bytes can be decoded."""
    try:
        kind.FromString(data)
    except DecodeError:
        return False
    return True


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
