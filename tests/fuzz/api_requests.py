"""Generates requests to the Responses API, the Messages API and the routes that take no body."""

import gzip
import urllib.parse
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.fuzz.api_bodies import BODIES, MESSAGES, RESPOND, BodyMaker
from tests.fuzz.value_maker import TEXTS

PAGES = (
    "/", "/docs", "/version", "/ping", "/load", "/health", "/ready", "/openapi.json", "/v1/models",
    "/v1/models/demo", "/v1/models//x", "/v1/responses", "/v1/conversations/x", "/favicon.ico",
)  # fmt: skip
METHODS = ("GET",) * 8 + ("HEAD", "OPTIONS", "DELETE", "POST", "PUT")
STORED = ("GET", "GET", "DELETE", "POST", "HEAD")
SUFFIXES = ("", "", "", "/input_items", "/input_items", "/cancel", "/input_tokens", "/x", "/")
IDS = ("resp_x", "resp_", "x" * 200, "../admin", "%00", "é", "resp_1%2Fcancel", "input_tokens", ".")
QUERY_NAMES = ("limit", "after", "order", "include", "include[]", "stream", "starting_after", "x")
QUERY_VALUES = ("1", "0", "2", "100", "-1", "9" * 30, "asc", "desc", "true", "false", "msg_0_in0")
ACCEPTED = ("*/*", "text/html", "application/json", "text/html;q=0.1,", "x", "x" * 900)
CONTENT_TYPES = (
    "application/json", "application/json; charset=utf-8", "text/plain", "application/json;", "x/y"
)  # fmt: skip
BOMB = gzip.compress(bytes(32 * 2**20), 9, mtime=0)
"""A small body that becomes larger than what the router accepts."""


@dataclass(frozen=True, slots=True)
class ApiRequest:
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    data: bytes | None = None

    @property
    def is_anthropic(self) -> bool:
        """Whether an error response to this request must have the form of Anthropic's API."""
        return self.method == "POST" and self.path.startswith(MESSAGES)


class RequestMaker(BodyMaker):
    """Generates requests. ``known_ids`` are ids of stored responses, to which some requests refer;
    the caller appends new ids to this list."""

    def __init__(self, rng: np.random.Generator, known_ids: list[str]) -> None:
        super().__init__(rng, known_ids)
        self._known = known_ids

    def request(self) -> ApiRequest:
        kind = self._rng.random()
        if kind < 0.05:
            return self._page()
        return self._stored() if kind < 0.2 else self._post()

    def _page(self) -> ApiRequest:
        headers = {"accept": self._one(ACCEPTED)} if self._chance(0.5) else {}
        return ApiRequest(self._one(METHODS), self._one(PAGES) + self._query(), headers)

    def _stored(self) -> ApiRequest:
        known = bool(self._known) and self._chance(0.8)
        response_id = self._one(self._known if known else IDS)
        suffix = self._one(SUFFIXES)
        method = "POST" if suffix == "/cancel" else self._one(STORED)
        return ApiRequest(method, f"{RESPOND}/{response_id}{suffix}{self._query()}")

    def _query(self) -> str:
        if self._chance(0.5):
            return ""
        pairs = [
            (self._one(QUERY_NAMES), self._one(QUERY_VALUES if self._chance(0.9) else TEXTS)[:2000])
            for _ in range(1 + self._below(3))
        ]
        return "?" + urllib.parse.urlencode(pairs, errors="replace")

    def _post(self) -> ApiRequest:
        path = self._one((RESPOND, MESSAGES) if self._chance(0.8) else tuple(BODIES))
        data = self.encoded(path)
        headers = {"content-type": "application/json"}
        if self._chance(0.02):
            headers["content-type"] = self._one(CONTENT_TYPES)
        if path.startswith(MESSAGES) or self._chance(0.1):
            headers["anthropic-version"] = self._one(("2023-06-01", "x"))
        if self._chance(0.1):
            encoding, data = self._compressed(data)
            headers["content-encoding"] = encoding
        return ApiRequest("POST", path, headers, data)

    def _compressed(self, data: bytes) -> tuple[str, bytes]:
        """Return a content encoding, and the body encoded with it. In some cases, the encoding and
        the body don't match, or the body is damaged."""
        if self._chance(0.05):
            return "gzip", BOMB
        packed: tuple[Any, ...] = (
            ("gzip", gzip.compress(data, 1, mtime=0)),
            ("x-gzip", gzip.compress(data, 1, mtime=0)),
            ("deflate", zlib.compress(data, 1)),
            ("identity", data),
        )
        encoding, body = self._one(packed)
        if self._chance(0.1):
            encoding = self._one(("br", "gzip, gzip", "zstd", "GZIP", "", "deflate;q=1"))
        return encoding, self.broken(body) if self._chance(0.15) else body
