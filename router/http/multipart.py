"""Parses multipart/form-data (RFC 7578) as it arrives: collects the text fields, and passes the
file's data on.

python-multipart (0.0.34 was tried) is not used because it breaks three rules that this parser
keeps. It raises an error for text before the first boundary, which is allowed (RFC 2046, 5.1.1) and
skipped here. If a boundary is followed by anything but a line break or ``--``, it treats the
boundary and the next part as data of the previous part; here that is an error. And it bounds the
number of a part's headers and the length of each header, but not their total size. It also logs a
warning for every malformed form, and its errors name byte offsets instead of what is wrong. Both
parsers are faster than 1 GB/s. With python-multipart, more than half of this file would still be
needed: the code that bounds the number of parts and the size of fields, reads the parts' names, and
passes the file's data on.
"""

import re
from collections.abc import Callable
from typing import Protocol

from router.errors import ApiError
from router.limits import (
    MAX_BOUNDARY_CHARACTERS,
    MAX_FIELD_BYTES,
    MAX_FILENAME_CHARACTERS,
    MAX_PARTS,
)

_BOUNDARY = re.compile(r'boundary="?([^";,\s]+)"?', re.IGNORECASE)
_NAME = re.compile(r'[;\s]name="([^"]*)"', re.IGNORECASE)
_FILENAME = re.compile(r'[;\s]filename="([^"]*)"', re.IGNORECASE)


class FileSink(Protocol):
    """The destination of an uploaded file."""

    def write(self, data: bytes) -> None:
        """Append data to the file. Raises ApiError when the file gets too large."""
        ...


def parse_boundary(content_type: str | None) -> bytes:
    """Return the boundary in a content type. Raises ApiError (415) if there is none or it is too
    long."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    found = _BOUNDARY.search(content_type or "")
    if kind != "multipart/form-data" or found is None:
        raise ApiError(415, "the body must have content-type multipart/form-data, with a boundary")
    if len(found[1]) > MAX_BOUNDARY_CHARACTERS:
        raise ApiError(415, f"the boundary must have at most {MAX_BOUNDARY_CHARACTERS} characters")
    return found[1].encode("latin-1", "replace")


class MultipartParser:
    """Parses one form: :meth:`push` its data, then :meth:`close`. ``texts`` are the names and
    values of the text fields, in their order; ``fields`` has the last value of each. The data of
    the part ``file`` goes to the sink that ``open_file`` returns for its file name. Methods raise
    ApiError (400) if the form is malformed; :meth:`push` also raises the errors of ``open_file``
    and of the sink."""

    def __init__(self, boundary: bytes, open_file: Callable[[str], FileSink]) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._open_file = open_file
        self._held = b"\r\n"  # so that the first boundary matches at the start of the body
        self._state: Callable[[], bool] = self._in_preamble
        self._name = ""
        self._sink: FileSink | None = None
        self._num_parts = 0
        self._field = b""
        self.texts: list[tuple[str, str]] = []
        self.filename: str | None = None

    @property
    def fields(self) -> dict[str, str]:
        return dict(self.texts)

    def push(self, data: bytes) -> None:
        self._held += data
        while self._state():
            pass

    def close(self) -> None:
        if self._state != self._in_epilogue:
            raise _malformed_form("the form ends before its last boundary")

    # -- states: each parses the start of the held data, and returns False if it needs more --------

    def _in_preamble(self) -> bool:
        """Skip the data before the first boundary."""
        found = self._consume_until_delimiter()
        return found is not None

    def _after_delimiter(self) -> bool:
        if len(self._held) < 2:
            return False
        if self._held.startswith(b"--"):
            self._state = self._in_epilogue
        elif self._held.startswith(b"\r\n"):
            self._state = self._in_headers
        else:
            raise _malformed_form("a boundary must be followed by a line break or `--`")
        return True

    def _in_headers(self) -> bool:
        # Keep the line break after the boundary, so that a part may have no headers at all.
        end = self._held.find(b"\r\n\r\n")
        if (len(self._held) if end < 0 else end) > MAX_FIELD_BYTES:
            raise _malformed_form(f"a part's headers have more than {MAX_FIELD_BYTES} bytes")
        if end < 0:
            return False
        self._begin_part(self._held[:end].decode(errors="replace"))
        self._held = self._held[end + 4 :]
        self._state = self._in_body
        return True

    def _in_body(self) -> bool:
        rest = self._consume_until_delimiter(self._consume)
        if rest is None:
            return False
        if self._sink is None:
            self.texts.append((self._name, self._field.decode(errors="replace")))
        return True

    def _in_epilogue(self) -> bool:
        self._held = b""
        return False

    # -- what the states do ----------------------------------------------------------------------

    def _consume_until_delimiter(
        self, consume: Callable[[bytes], None] | None = None
    ) -> bytes | None:
        """Pass the held data to ``consume``, except what may be the beginning of a boundary. If the
        boundary has been found, return the last piece of data before it, else None."""
        found = self._held.find(self._delimiter)
        num_certain = found if found >= 0 else max(len(self._held) - len(self._delimiter) + 1, 0)
        data, self._held = self._held[:num_certain], self._held[num_certain:]
        if consume is not None and data:
            consume(data)
        if found < 0:
            return None
        self._held = self._held[len(self._delimiter) :]
        self._state = self._after_delimiter
        return data

    def _begin_part(self, headers: str) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed_form(f"the form has more than {MAX_PARTS} parts")
        name, filename = _NAME.search(headers), _FILENAME.search(headers)
        if name is None:
            raise _malformed_form("a part of the form has no name")
        self._name, self._field, self._sink = name[1], b"", None
        if self._name == "file":
            if self.filename is not None:
                raise _malformed_form("the form has more than one file")
            self.filename = filename[1] if filename is not None else "file"
            if len(self.filename) > MAX_FILENAME_CHARACTERS:
                raise _malformed_form(
                    f"the file's name has more than {MAX_FILENAME_CHARACTERS} characters"
                )
            self._sink = self._open_file(self.filename)

    def _consume(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.write(data)
            return
        self._field += data
        if len(self._field) > MAX_FIELD_BYTES:
            raise _malformed_form(f"the field {self._name!r} has more than {MAX_FIELD_BYTES} bytes")


def _malformed_form(what: str) -> ApiError:
    return ApiError(400, f"the form is malformed: {what}", code="invalid_form")
