"""Requests and responses of vLLM's ``/v1/completions``, with token ids instead of text.

vLLM 0.28 to 0.32; the fields have been there since 0.12.
"""

import secrets
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import orjson

from attached_worker.server import Seeds, ServerFacts
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import TokenId
from baton.core.kv_transfer import ServerKv
from baton.core.request import FinishReason, RequestSpec, SamplingParams, TokenLogprob
from baton.core.server_api import KNOWN_PATHS, hashed_salt
from baton.errors import Invalid, Unavailable

MAX_SEED = 2**63 - 1
"""vLLM's seeds are signed."""

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""Any other reason, such as ``abort``, means that the answer is incomplete."""

TOKEN_NAME = "token_id:"


TRANSFER = "kv_transfer_params"
CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
TRANSFER_FLAG = f"--kv-transfer-config '{orjson.dumps(CONNECTOR).decode()}'"
GRAMMAR_FLAG = '--structured-outputs-config \'{"backend":"guidance"}\''
PROBE_GRAMMAR = "start: WORD\nWORD: /(?s:.+)/ & ~/(?s:.*)<(?s:.*)/"
"""In llguidance's dialect of Lark, as the grammars of tool calls."""

PROBE = "baton-probe"
"""The ``user`` of requests that serve nobody."""

PROBE_TOKEN_ID = 1
PROBE_BOUNDARY = "baton-probe-form"
SILENCE_SAMPLES = 8000  # at 16 kHz; shorter ones are less than a frame for some models

LEND_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Asks NixlConnector to lend the KV of the prompt."""


def is_streamed(spec: RequestSpec) -> bool:
    """Whether the answer is streamed. A server does not stream logprobs of prompts."""
    return not spec.wants_prompt_logprobs


def encode_request(spec: RequestSpec, facts: ServerFacts, kv: ServerKv | None = None) -> bytes:
    """Build the body of the request for the rest of the answer: after a failover, the prompt has
    the tokens that were emitted before. With ``kv``, the server reads the prompt's KV from another
    one. Raises Invalid for what the server can't do."""
    body = _request(spec, facts)
    if is_streamed(spec):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if kv is not None:
        body[TRANSFER] = _parameters(kv, facts.block_tokens)
        # KV that was not the prompt's, after all, must not serve anybody else.
        body["cache_salt"] = secrets.token_hex(16)
    return orjson.dumps(body)


def encode_prefill(spec: RequestSpec, facts: ServerFacts, *, samples: bool) -> bytes:
    """Build the body of the request that computes a prompt and lends its KV. Unless it ``samples``,
    the token is chosen as fast as it can be."""
    sampling = SamplingParams(1, temperature=0.0, ignore_eos=True)
    body = _request(spec if samples else replace(spec, sampling=sampling), facts)
    return orjson.dumps(body | {"max_tokens": 1, TRANSFER: LEND_KV})


def encode_least(facts: ServerFacts) -> tuple[str, bytes, str]:
    """Return the path, the body and the content type of the smallest request that a server which
    generates no tokens computes. Raises Invalid if Baton knows none of its routes."""
    for path in ("/pooling", "/v1/embeddings", "/classify"):
        if path in facts.paths:
            body = {"model": facts.model, "input": [PROBE_TOKEN_ID], "user": PROBE}
            return path, orjson.dumps(body), "application/json"
    if "/v1/audio/transcriptions" not in facts.paths:
        raise Invalid(f"the server offers none of {', '.join(KNOWN_PATHS)}")
    fields = {"model": facts.model, "max_completion_tokens": "1", "user": PROBE}
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts.append(b'name="file"; filename="silence.wav"\r\n\r\n' + _silence())
    start = f"--{PROBE_BOUNDARY}\r\ncontent-disposition: form-data; ".encode()
    form = b"".join(start + part + b"\r\n" for part in parts) + f"--{PROBE_BOUNDARY}--".encode()
    return "/v1/audio/transcriptions", form, f"multipart/form-data; boundary={PROBE_BOUNDARY}"


def _silence() -> bytes:
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, SILENCE_SAMPLES, "NONE", ""))
        writer.writeframes(bytes(2 * SILENCE_SAMPLES))
    return file.getvalue()


def _parameters(kv: ServerKv, block_tokens: int) -> dict[str, Any]:
    """Return the parameters for a request that may have one token more than ``kv``. The server
    pairs its blocks with those of the other server from the end; if the token is the first of a
    block, the last block is therefore named twice. The token's KV is computed over the copy."""
    parameters: dict[str, Any] = orjson.loads(kv.parameters)
    if kv.token_id is not None and kv.num_tokens % block_tokens == 0:
        groups = parameters["remote_block_ids"]
        parameters["remote_block_ids"] = [[*blocks, blocks[-1]] for blocks in groups]
    return parameters


def transfer_parameters(response: Mapping[str, Any], num_tokens: int) -> bytes:
    """Return what another server needs to read the KV of a prompt of ``num_tokens`` tokens, as
    JSON. Raises Unavailable if the server lends none, or that of another prompt."""
    parameters = response.get(TRANSFER)
    if not parameters or not parameters.get("do_remote_prefill"):
        raise Unavailable(f"the server lends no KV: it must be started with {TRANSFER_FLAG}")
    lent = parameters.get("remote_num_tokens", num_tokens)
    if lent != num_tokens:
        raise Unavailable(f"the server lends KV of {lent} tokens for a prompt of {num_tokens}")
    return orjson.dumps(parameters)


def has_one_group(response: Mapping[str, Any]) -> bool:
    """Whether all layers of the model have the same blocks."""
    return len(response[TRANSFER]["remote_block_ids"]) == 1


def _request(spec: RequestSpec, facts: ServerFacts) -> dict[str, Any]:
    sampling = spec.sampling
    if spec.attention_window is not None:
        raise Invalid("attention_window is not supported by this server", param="attention_window")
    body: dict[str, Any] = {
        "model": facts.model if spec.adapter is None else spec.adapter.name,
        "prompt": spec.token_ids,
        "max_tokens": spec.max_new_tokens,
        "min_tokens": max(sampling.min_tokens - spec.num_emitted_tokens, 0),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    if not sampling.is_greedy:
        body |= seed_fields(sampling.seed, facts.seeds)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if spec.wants_prompt_logprobs:
        body["prompt_logprobs"] = sampling.prompt_logprobs
    if sampling.grammar is not None:
        body["structured_outputs"] = _structured_outputs(sampling.grammar, facts)
    if spec.tenant_salt:
        body["cache_salt"] = hashed_salt(spec.tenant_salt)
    return body


def seed_fields(seed: int, seeds: Seeds) -> dict[str, Any]:
    """Return the fields that give a server the seed of a sampled request."""
    match seeds:
        case Seeds.NATIVE:
            return {"seed": seed & MAX_SEED}
        case Seeds.PROCESSOR:
            return {"vllm_xargs": {"baton_seed": seed & MAX_SEED}}
        case Seeds.IGNORED:
            return {}


def _structured_outputs(grammar: Grammar, facts: ServerFacts) -> dict[str, Any]:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return {"json_object": True}
        case GrammarKind.JSON_SCHEMA:
            return {"json": grammar.text}
        case GrammarKind.REGEX:
            return {"regex": grammar.text}
        case GrammarKind.CHOICE:
            return {"choice": orjson.loads(grammar.text)}
        case GrammarKind.LARK if not facts.has_lark:
            raise Invalid(
                f"the server can't hold answers to tool calls or Lark: start it with {GRAMMAR_FLAG}"
            )
        case GrammarKind.LARK:
            return {"grammar": grammar.text}
    raise Invalid("bad_words and allowed_token_ids are not supported by this server")


class EventReader:
    """Splits a stream of server-sent events into their JSON objects."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the objects that ``data`` completes. Raises ValueError for what is not JSON."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line[6:] != b"[DONE]":
                yield orjson.loads(line[6:])


def token_logprobs(choice: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """Return the logprobs of a chunk's tokens."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        return ()
    tops = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
    return tuple(
        TokenLogprob(_token_id(token), logprob, _top(top or {}))
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
        )
    )


def _top(top: Mapping[str, float]) -> tuple[tuple[TokenId, float], ...]:
    ranked = sorted(top.items(), key=lambda entry: -entry[1])
    return tuple((_token_id(token), logprob) for token, logprob in ranked)


def _token_id(name: str) -> TokenId:
    return TokenId(int(name.removeprefix(TOKEN_NAME)))


def prompt_logprobs(
    choice: Mapping[str, Any], prompt: Sequence[TokenId], num_top: int
) -> tuple[TokenLogprob, ...]:
    """Return the logprobs of the prompt's tokens but the first, which has none."""
    entries = choice.get("prompt_logprobs") or []
    return tuple(
        _prompt_logprob(token, entry, num_top)
        for token, entry in zip(prompt[1:], entries[1:], strict=False)
    )


def _prompt_logprob(token: TokenId, entry: Mapping[str, Any], num_top: int) -> TokenLogprob:
    ranked = sorted(entry.items(), key=lambda item: item[1]["rank"])
    top = tuple((TokenId(int(name)), float(score["logprob"])) for name, score in ranked)
    return TokenLogprob(token, float(entry[str(token)]["logprob"]), top[:num_top])
