"""multipart/form-data (RFC 7578), read as it arrives: fields are kept, a file goes elsewhere."""

import re
from collections.abc import Callable
from typing import Protocol

from router.errors import ApiError

MAX_PARTS = 16
MAX_HEADER_BYTES = 4096
MAX_FIELD_BYTES = 4096
MAX_BOUNDARY_CHARACTERS = 70
"""The standard's own bound (RFC 2046)."""

_BOUNDARY = re.compile(r'boundary="?([^";,\s]+)"?', re.IGNORECASE)
_NAME = re.compile(r'[;\s]name="([^"]*)"', re.IGNORECASE)
_FILENAME = re.compile(r'[;\s]filename="([^"]*)"', re.IGNORECASE)


class FileSink(Protocol):
    """Where a file goes."""

    def write(self, data: bytes) -> None:
        """Raises Problem when it is too much."""
        ...


def parse_boundary(content_type: str | None) -> bytes:
    """Raises Problem (415)."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    found = _BOUNDARY.search(content_type or "")
    if kind != "multipart/form-data" or found is None:
        raise ApiError(415, "the body must have content-type multipart/form-data, with a boundary")
    if len(found[1]) > MAX_BOUNDARY_CHARACTERS:
        raise ApiError(415, f"a boundary has at most {MAX_BOUNDARY_CHARACTERS} characters")
    return found[1].encode("latin-1", "replace")


class MultipartParser:
    """:meth:`push` what comes, then :meth:`close`. ``fields`` are text by name; the part ``file``
    goes to what ``open_file`` makes of its name. All raise Problem (400)."""

    def __init__(self, boundary: bytes, open_file: Callable[[str], FileSink]) -> None:
        self._mark = b"\r\n--" + boundary
        self._open_file = open_file
        self._held = b"\r\n"  # the first mark begins the body
        self._state: Callable[[], bool] = self._before
        self._name = ""
        self._sink: FileSink | None = None
        self._num_parts = 0
        self._field = b""
        self.fields: dict[str, str] = {}
        self.filename: str | None = None

    def push(self, data: bytes) -> None:
        self._held += data
        while self._state():
            pass

    def close(self) -> None:
        if self._state != self._over:
            raise _malformed_form("it ends too early")

    # -- states: each reads from the beginning of what is held, and is False when it needs more ----

    def _before(self) -> bool:
        """What stands before the first mark means nothing."""
        found = self._until_mark()
        return found is not None

    def _after_mark(self) -> bool:
        if len(self._held) < 2:
            return False
        if self._held.startswith(b"--"):
            self._state = self._over
        elif self._held.startswith(b"\r\n"):
            self._state = self._in_headers
        else:
            raise _malformed_form("a boundary is followed by something")
        return True

    def _in_headers(self) -> bool:
        # The line break after the mark stays, so that a part may have no headers at all.
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            if len(self._held) > MAX_HEADER_BYTES:
                raise _malformed_form(f"a part's headers have more than {MAX_HEADER_BYTES} bytes")
            return False
        self._begin_part(self._held[:end].decode(errors="replace"))
        self._held = self._held[end + 4 :]
        self._state = self._in_body
        return True

    def _in_body(self) -> bool:
        at_end = self._until_mark(self._take)
        if at_end is None:
            return False
        if self._sink is None:
            self.fields[self._name] = self._field.decode(errors="replace")
        return True

    def _over(self) -> bool:
        self._held = b""
        return False

    # -- what the states do ----------------------------------------------------------------------

    def _until_mark(self, take: Callable[[bytes], None] | None = None) -> bytes | None:
        """What is before the mark goes to ``take``, as far as it is certain."""
        found = self._held.find(self._mark)
        certain = found if found >= 0 else max(len(self._held) - len(self._mark) + 1, 0)
        data, self._held = self._held[:certain], self._held[certain:]
        if take is not None and data:
            take(data)
        if found < 0:
            return None
        self._held = self._held[len(self._mark) :]
        self._state = self._after_mark
        return data

    def _begin_part(self, headers: str) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed_form(f"it has more than {MAX_PARTS} parts")
        name, filename = _NAME.search(headers), _FILENAME.search(headers)
        if name is None:
            raise _malformed_form("a part has no name")
        self._name, self._field, self._sink = name[1], b"", None
        if self._name == "file":
            if self.filename is not None:
                raise _malformed_form("there is more than one file")
            self.filename = filename[1] if filename is not None else "file"
            self._sink = self._open_file(self.filename)

    def _take(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.write(data)
            return
        self._field += data
        if len(self._field) > MAX_FIELD_BYTES:
            raise _malformed_form(f"the field {self._name!r} has more than {MAX_FIELD_BYTES} bytes")


def _malformed_form(what: str) -> ApiError:
    return ApiError(400, f"the form is malformed: {what}", code="invalid_form")
