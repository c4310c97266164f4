"""Queries the server, before the load, for its model, its context length, and how it counts
tokens."""

from dataclasses import dataclass, replace
from typing import Any

import httpx
import orjson

from baton.errors import BatonError, Invalid, NotFound, Unauthorized, Unavailable
from baton.traces.trace import Trace, TraceRequest
from load_generator.prompts import RequestBodyEncoder, TokenCalibration
from load_generator.target import BenchTarget

PROBE_TIMEOUT_SECONDS = 60.0
"""The timeout of one short request; a cold server may still load or compile its model."""

PROBE_WORDS = (16, 144)
"""The lengths of two prompts, in words. Their difference in tokens gives the tokens per word; the
remaining tokens come from the chat template."""

PROBE_BLOCK_TOKENS = 64

CONTEXT_MARGIN = 0.9
"""The share of the context that prompts of text may use, since their length in tokens is not
exact."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """``max_context_tokens`` is the maximum number of tokens of prompt and answer in total; None if
    the server does not report it."""

    model: str
    max_context_tokens: int | None


async def query_server(target: BenchTarget, model: str | None) -> ServerInfo:
    """Return the given model, or else the server's first one, together with its context length.
    Raises Unavailable, Unauthorized or NotFound if the server can't be queried, and Invalid if no
    model is given and the server lists none."""
    listed = (await _request_json(target, "GET", "/models")).get("data") or []
    listed = [each for each in listed if isinstance(each, dict)]
    names = [str(each.get("id")) for each in listed]
    if model is None and not names:
        raise Invalid("the server lists no model: name one with --model NAME")
    chosen = model or names[0]
    description = dict(zip(names, listed, strict=False)).get(chosen, {})
    context = description.get("max_model_len")
    return ServerInfo(chosen, context if isinstance(context, int) and context > 0 else None)


async def calibrate_tokens(target: BenchTarget, encoder: RequestBodyEncoder) -> TokenCalibration:
    """Measure how the server counts tokens, with two short requests. Return the default calibration
    if the server reports no usable counts. Raises BatonError when the server refuses the
    requests."""
    exact = replace(encoder, block_tokens=PROBE_BLOCK_TOKENS)
    counts = [await _count_prompt_tokens(target, exact, words) for words in PROBE_WORDS]
    few, many = counts
    if few is None or many is None or many <= few:
        return TokenCalibration()
    per_word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    return TokenCalibration(per_word, max(few - PROBE_WORDS[0] * per_word, 0.0))


def fit_to_context(trace: Trace, context: int | None, has_exact_lengths: bool) -> tuple[Trace, int]:
    """Shorten the requests that are too long for the server's context; return the trace and how
    many were shortened."""
    if context is None:
        return trace, 0
    limit = context if has_exact_lengths else int(context * CONTEXT_MARGIN)
    arrivals = tuple(_shorten(arrival, limit, trace.block_tokens) for arrival in trace.requests)
    pairs = zip(arrivals, trace.requests, strict=True)
    return replace(trace, requests=arrivals), sum(new is not old for new, old in pairs)


def _shorten(arrival: TraceRequest, limit: int, block_tokens: int) -> TraceRequest:
    if arrival.num_prompt_tokens + arrival.num_answer_tokens <= limit:
        return arrival
    answer = min(arrival.num_answer_tokens, max(limit // 2, 1))
    prompt = max(min(arrival.num_prompt_tokens, limit - answer), 1)
    blocks = arrival.block_ids[: -(-prompt // block_tokens)]
    return replace(arrival, num_prompt_tokens=prompt, num_answer_tokens=answer, block_ids=blocks)


async def _count_prompt_tokens(
    target: BenchTarget, encoder: RequestBodyEncoder, words: int
) -> int | None:
    blocks = tuple(range(-(-words // PROBE_BLOCK_TOKENS)))
    body = encoder.encode_body(TraceRequest(0.0, words, 1, blocks))
    response = await _request_json(target, "POST", encoder.path, _without_streaming(body))
    count = (response.get("usage") or {}).get("prompt_tokens")
    return count if isinstance(count, int) else None


def _without_streaming(body: bytes) -> bytes:
    fields = orjson.loads(body)
    del fields["stream"], fields["stream_options"]
    return orjson.dumps(fields)


async def _request_json(
    target: BenchTarget, method: str, path: str, body: bytes = b""
) -> dict[str, Any]:
    url = f"{target.url}/v1{path}"
    headers = {"content-type": "application/json"}
    if target.api_key:
        headers["authorization"] = f"Bearer {target.api_key}"
    verify: Any = target.tls or False  # without TLS, certificates need not be read
    try:
        async with httpx.AsyncClient(
            verify=verify, timeout=PROBE_TIMEOUT_SECONDS, trust_env=False
        ) as client:
            response = await client.request(method, url, content=body, headers=headers)
    except httpx.HTTPError as error:
        raise Unavailable(f"{url} can't be reached: {error or type(error).__name__}") from error
    if response.status_code != 200:
        raise _response_error(url, response)
    try:
        fields = response.json()
    except ValueError as error:
        raise Unavailable(f"{url} did not return JSON; OpenAI's API does") from error
    if not isinstance(fields, dict):
        raise Unavailable(f"{url} did not return a JSON object; OpenAI's API returns one")
    return fields


def _response_error(url: str, response: httpx.Response) -> BatonError:
    text = " ".join(response.text[:300].split())
    if response.status_code in (401, 403):
        return Unauthorized(f"{url} returned {response.status_code}: use --api-key KEY ({text})")
    if response.status_code == 404:
        return NotFound(f"{url} returned 404: is --url right? ({text})")
    return Unavailable(f"{url} returned {response.status_code}: {text}")
