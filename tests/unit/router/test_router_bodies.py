"""Tests request bodies as clients send them: compressed, with a byte order mark, and with other
content types."""

import gzip
import zlib
from collections.abc import AsyncIterator

import orjson
import pytest

from baton.text.tokenizer import Tokenizer
from router.http.content_decoding import BodyDecompressor
from router.limits import STEP_BYTES, STEP_INPUT_BYTES
from tests import router_harness
from tests.router_harness import CHAT, chat, open_harness, wrong_error

tokenizer = router_harness.tokenizer

BODY = orjson.dumps(chat())
ORIGINS = ("http://chat.example",)


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "text/plain; charset=utf-8"]
)
async def test_json_with_the_content_type_of_a_form_is_parsed(
    tokenizer: Tokenizer, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    async with open_harness(tokenizer) as (_, client):
        response = await client.post(CHAT, content=BODY, headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_browsers_must_send_the_content_type_of_json(tokenizer: Tokenizer, kind: str) -> None:
    """With another content type, such as a form's, a page of another site could send requests
    without a CORS preflight."""
    page = {"origin": ORIGINS[0]}
    async with open_harness(tokenizer, cors_origins=ORIGINS) as (router, client):
        for browser in (page, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "same-site"}):
            headers = {"content-type": kind, **browser}
            wrong_error(await client.post(CHAT, content=BODY, headers=headers), 415)
        evil = {"content-type": kind, "origin": "http://evil.example"}
        wrong_error(await client.post(CHAT, content=BODY, headers=evil), 403)
        assert router.placer.queries == []
        json = {"content-type": "application/json", **page}
        assert (await client.post(CHAT, content=BODY, headers=json)).status_code == 200


async def test_a_byte_order_mark_is_skipped(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        response = await client.post(CHAT, content=b"\xef\xbb\xbf" + BODY)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("X-GZip", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
    ],
    ids=["gzip", "x-gzip", "deflate", "identity"],
)
async def test_compressed_bodies_are_decompressed(
    tokenizer: Tokenizer, encoding: str, data: bytes
) -> None:
    async with open_harness(tokenizer) as (router, client):
        headers = {"content-encoding": encoding}
        response = await client.post(CHAT, content=data, headers=headers)
        assert response.status_code == 200, response.text
        assert router.service.resources.body_budget.num_in_use == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (BODY, "incorrect header check"),
        (gzip.compress(BODY, mtime=0)[:-1], "the compressed data ends too early"),
        (b"", "the compressed data ends too early"),
        (gzip.compress(BODY, mtime=0) + b"x", "more data follows the end"),
        (gzip.compress(BODY, mtime=0)[:-8] + bytes(8), "incorrect data check"),
    ],
    ids=["plain", "cut", "empty", "longer", "damaged"],
)
async def test_invalid_compressed_bodies_are_refused(
    tokenizer: Tokenizer, data: bytes, reason: str
) -> None:
    async with open_harness(tokenizer) as (router, client):
        headers = {"content-encoding": "gzip"}
        error = wrong_error(await client.post(CHAT, content=data, headers=headers))
        assert router.service.resources.body_budget.num_in_use == 0
    assert error["code"] == "invalid_encoding" and reason in error["message"]


async def test_decompressed_bodies_have_the_same_limit(tokenizer: Tokenizer) -> None:
    """The body has 200 kB, and would have 200 MB when decompressed. It is refused in the step of
    the decompression that exceeds the limit."""
    bomb = gzip.compress(b" " * 200_000_000, 1, mtime=0)
    async with open_harness(tokenizer, max_body_bytes=1_000_000) as (router, client):
        headers = {"content-encoding": "gzip"}
        error = wrong_error(await client.post(CHAT, content=bomb, headers=headers), 413)
        assert error["code"] == "body_too_large"
        assert router.service.resources.body_budget.num_in_use == 0


async def test_decompressed_bodies_count_against_the_memory_for_bodies(
    tokenizer: Tokenizer,
) -> None:
    body = gzip.compress(orjson.dumps(chat("x" * 500_000)))
    async with open_harness(tokenizer, max_inflight_body_bytes=100_000) as (_, client):
        headers = {"content-encoding": "gzip"}
        wrong_error(await client.post(CHAT, content=body, headers=headers), 429)


async def test_empty_blocks_are_bounded_too(tokenizer: Tokenizer) -> None:
    """The compressed body consists of empty blocks, so its decompressed size never reaches the
    limit, but its compressed size does."""
    empty = zlib.compressobj()
    blocks = b"".join(empty.flush(zlib.Z_FULL_FLUSH) or b"\0\0\0\xff\xff" for _ in range(3000))
    async with open_harness(tokenizer, max_body_bytes=10_000) as (_, client):

        async def parts() -> AsyncIterator[bytes]:
            yield blocks

        headers = {"content-encoding": "deflate"}
        wrong_error(await client.post(CHAT, content=parts(), headers=headers), 413)


@pytest.mark.parametrize("size", [0, 1, STEP_BYTES - 1, STEP_BYTES, 3 * STEP_BYTES + 7])
def test_steps_are_bounded_and_complete(size: int) -> None:
    data = bytes(size)
    compressed = zlib.compress(data)
    for part_size in (1, 7, len(compressed)):
        decompressor = BodyDecompressor()
        steps = [
            step
            for start in range(0, len(compressed), part_size)
            for step in decompressor.decompress(compressed[start : start + part_size])
        ]
        decompressor.finish()
        assert b"".join(steps) == data
        assert all(len(step) <= STEP_BYTES for step in steps)


def test_steps_take_a_bounded_part_of_the_input() -> None:
    """A compressed body may consist of empty deflate blocks. Without this bound, one step would
    process all of them that have arrived, and other requests would wait until it ends."""
    header, empty_block = zlib.compress(b"")[:2], b"\0\0\0\xff\xff"
    steps = list(BodyDecompressor().decompress(header + empty_block * 100_000))
    assert len(steps) == -(-(2 + 500_000) // STEP_INPUT_BYTES)


async def test_integral_floats_are_integers(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        fields = {"max_tokens": 3.0, "n": 2.0, "seed": -1.0, "top_k": 5.0}
        response = await client.post(CHAT, json=chat(**fields))
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == 2
        assert router.prefill.submitted[0].spec.sampling.max_tokens == 3
        for wrong in ({"max_tokens": 3.5}, {"max_tokens": 0.0}, {"n": True}, {"seed": "1"}):
            (name,) = wrong
            assert wrong_error(await client.post(CHAT, json=chat(**wrong)))["param"] == name
