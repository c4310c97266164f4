"""Checks a request's head before anything acts on it (RFC 9110, RFC 9112).

llhttp parses the lines and refuses most malformed ones. Some that it accepts are ambiguous: a proxy
in front of the router might read the host, the end of the body, or a repeated header differently
than the router does. All of these are refused here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from router.errors import ApiError

Headers = Sequence[tuple[bytes, bytes]]

INVALID_HTTP = "invalid_http"
"""The error code of anything that is not valid HTTP/1.1."""

NON_REPEATABLE_HEADERS = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"origin",
        b"transfer-encoding",
        b"x-api-key",
    }
)
"""Headers that may occur only once. If one is repeated, some programs use the first, others the
last."""

_LINE = re.compile(rb"(?:\r\n)*([A-Z-]+) ([!-~]+) HTTP/1\.([01])\r\n")
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+;=%-]*)(?::[0-9]{0,5})?")
_ABSOLUTE = re.compile(rb"https?://([^/?#@\\]+)(/[^#]*|\?[^#]*|)", re.IGNORECASE)


class RequestHead(NamedTuple):
    """A checked head. ``target`` is in origin form: the path and the query. ``authority`` is the
    host and port of an absolute target, which overrides Host; it is empty otherwise.
    ``waits_for_100`` says whether the client waits for a 100 response before it sends the body.
    ``body_bytes`` is the body's length, or None if the body is chunked."""

    target: bytes
    authority: bytes
    waits_for_100: bool
    body_bytes: int | None


def parse_request_head(raw: bytes, headers: Headers) -> RequestHead:
    """Check a request's head and return its parts. ``raw`` is the head, including its empty line;
    the names in ``headers`` are in lower case.

    Raises ApiError (400, 417, 501).
    """
    line = _LINE.match(raw)
    if line is None:
        raise _invalid_http(
            "the first line must be METHOD TARGET HTTP/1.1, with single spaces in between"
        )
    method, target, minor = line.groups()
    is_http10 = minor == b"0"
    values = dict(headers)
    if len(values) < len(headers):
        _check_repeated([name for name, _ in headers])
    _check_host(values.get(b"host"), is_http10)
    authority = b""
    if target[:1] != b"/" or b"#" in target:
        target, authority = _origin_form(method, target)
    expect = values.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise ApiError(417, "the Expect header must be 100-continue", code=INVALID_HTTP)
    waits = expect is not None and not is_http10
    return RequestHead(target, authority, waits, _body_length(values, is_http10))


def _check_repeated(names: Sequence[bytes]) -> None:
    for name in NON_REPEATABLE_HEADERS:
        if names.count(name) > 1:
            raise _invalid_http(
                f"the {name.decode().title()} header is given more than once; give it once"
            )


def _check_host(host: bytes | None, is_http10: bool) -> None:
    if host is None:
        if not is_http10:
            raise _invalid_http("the Host header is missing; HTTP/1.1 requires it")
    elif _HOST.fullmatch(host) is None:
        raise _invalid_http("the Host header must be a name or an address, with or without a port")


def _origin_form(method: bytes, target: bytes) -> tuple[bytes, bytes]:
    """Return the path with its query, and the host and port of an absolute target; for other
    targets, the host and port are empty."""
    if method == b"CONNECT":
        raise ApiError(
            501, "CONNECT is not supported: this server is not a proxy", code=INVALID_HTTP
        )
    if target == b"*" and method == b"OPTIONS":
        return target, b""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or _HOST.fullmatch(absolute[1]) is None:
        raise _invalid_http("the target must be a path like /v1/models, or http://HOST/PATH")
    path: bytes = absolute[2]
    return path if path[:1] == b"/" else b"/" + path, absolute[1]


def _body_length(values: Mapping[bytes, bytes], is_http10: bool) -> int | None:
    coding = values.get(b"transfer-encoding")
    if coding is None:
        return int(values.get(b"content-length", b"0"))  # llhttp has checked that it is a number
    if is_http10:
        raise _invalid_http("HTTP/1.0 has no Transfer-Encoding; use HTTP/1.1 or Content-Length")
    if coding.lower() != b"chunked":
        raise ApiError(501, "the Transfer-Encoding header must be chunked", code=INVALID_HTTP)
    return None


def _invalid_http(message: str) -> ApiError:
    return ApiError(400, message, code=INVALID_HTTP)
