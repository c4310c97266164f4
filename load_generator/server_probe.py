"""What a server says of itself, and how it counts, before any load."""

from dataclasses import dataclass, replace
from typing import Any

import httpx
import orjson

from baton.errors import BatonError, Invalid, NotFound, Unauthorized, Unavailable
from baton.traces.trace import Trace, TraceRequest
from load_generator.prompts import RequestBodyEncoder, TokenCalibration
from load_generator.target import BenchTarget

PROBE_SECONDS = 60.0
"""For one short answer; a cold server may load what it needs for it."""

PROBE_WORDS = (16, 144)
"""Two prompts tell the tokens of a word from those that are put around."""

PROBE_BLOCK = 64

CONTEXT_MARGIN = 0.9
"""Of the context, for prompts of text: their length is not exact."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """``context`` is the most tokens of prompt and answer together; None: it does not say."""

    model: str
    context: int | None


async def query_server(target: BenchTarget, model: str | None) -> ServerInfo:
    """Its first model, unless one is asked for. Raises Unavailable, Unauthorized, NotFound, Invalid
    when it names none."""
    listed = (await _ask(target, "GET", "/models")).get("data") or []
    listed = [each for each in listed if isinstance(each, dict)]
    names = [str(each.get("id")) for each in listed]
    if model is None and not names:
        raise Invalid("the server names no model: --model NAME")
    chosen = model or names[0]
    told = dict(zip(names, listed, strict=False)).get(chosen, {})
    context = told.get("max_model_len")
    return ServerInfo(chosen, context if isinstance(context, int) and context > 0 else None)


async def calibrate_tokens(target: BenchTarget, wording: RequestBodyEncoder) -> TokenCalibration:
    """By two short requests. Raises BatonError when the server refuses them."""
    exact = replace(wording, block_tokens=PROBE_BLOCK)
    counts = [await _count(target, exact, words) for words in PROBE_WORDS]
    few, many = counts
    if few is None or many is None or many <= few:
        return TokenCalibration()
    per_word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    return TokenCalibration(per_word, max(few - PROBE_WORDS[0] * per_word, 0.0))


def fit_to_context(trace: Trace, context: int | None, exact: bool) -> tuple[Trace, int]:
    """Requests that are too long for the server's context, shortened; and how many those were."""
    if context is None:
        return trace, 0
    limit = context if exact else int(context * CONTEXT_MARGIN)
    arrivals = tuple(_fitted(arrival, limit, trace.block_tokens) for arrival in trace.arrivals)
    pairs = zip(arrivals, trace.arrivals, strict=True)
    return replace(trace, arrivals=arrivals), sum(new is not old for new, old in pairs)


def _fitted(arrival: TraceRequest, limit: int, block_tokens: int) -> TraceRequest:
    if arrival.num_prompt_tokens + arrival.num_answer_tokens <= limit:
        return arrival
    answer = min(arrival.num_answer_tokens, max(limit // 2, 1))
    prompt = max(min(arrival.num_prompt_tokens, limit - answer), 1)
    blocks = arrival.blocks[: -(-prompt // block_tokens)]
    return replace(arrival, num_prompt_tokens=prompt, num_answer_tokens=answer, blocks=blocks)


async def _count(target: BenchTarget, wording: RequestBodyEncoder, words: int) -> int | None:
    blocks = tuple(range(-(-words // PROBE_BLOCK)))
    body = wording.body(TraceRequest(0.0, words, 1, blocks))
    answer = await _ask(target, "POST", wording.path, _unstreamed(body))
    count = (answer.get("usage") or {}).get("prompt_tokens")
    return count if isinstance(count, int) else None


def _unstreamed(body: bytes) -> bytes:
    fields = orjson.loads(body)
    del fields["stream"], fields["stream_options"]
    return orjson.dumps(fields)


async def _ask(target: BenchTarget, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
    url = f"{target.url}/v1{path}"
    headers = {"content-type": "application/json"}
    if target.api_key:
        headers["authorization"] = f"Bearer {target.api_key}"
    verify: Any = target.tls or False  # without TLS, certificates need not be read
    try:
        async with httpx.AsyncClient(
            verify=verify, timeout=PROBE_SECONDS, trust_env=False
        ) as client:
            answer = await client.request(method, url, content=body, headers=headers)
    except httpx.HTTPError as error:
        raise Unavailable(f"{url} can't be reached: {error or type(error).__name__}") from error
    if answer.status_code != 200:
        raise _refused(url, answer)
    try:
        told = answer.json()
    except ValueError as error:
        raise Unavailable(f"{url} does not answer in JSON: is it OpenAI's API?") from error
    if not isinstance(told, dict):
        raise Unavailable(f"{url} does not answer as OpenAI's API does")
    return told


def _refused(url: str, answer: httpx.Response) -> BatonError:
    text = " ".join(answer.text[:300].split())
    if answer.status_code in (401, 403):
        return Unauthorized(f"{url} says {answer.status_code}: --api-key KEY ({text})")
    if answer.status_code == 404:
        return NotFound(f"{url} says 404: is --url right? ({text})")
    return Unavailable(f"{url} says {answer.status_code}: {text}")
