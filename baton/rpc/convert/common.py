"""Conversion between protobuf messages and types of ``baton.core``. Incoming messages are validated
here."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import cast

from baton.core.adapter import ADAPTER_DIGEST_BYTES, AdapterRef, is_adapter_name
from baton.core.attention_window import MAX_WINDOW_TOKENS, AttentionWindow
from baton.core.block_key import BLOCK_KEY_BYTES
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef, Endpoint, WorkerRef
from baton.core.priority import Priority
from baton.core.request import (
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    FinishReason,
    RequestOutput,
    RequestSpec,
    SamplingParams,
    TokenLogprob,
)
from baton.core.store import StoreHint
from baton.core.tenant import TAG_BYTES
from baton.core.trace_context import TRACEPARENT_LENGTH
from baton.errors import Invalid
from baton.rpc.v1 import common_pb2 as pb

MAX_ID_BYTES = 256
MAX_DETAILS = 64
MAX_CACHED_REFS = 4096
"""Maximum number of cached references to workers, a few hundred bytes each."""

_FINISH_TO_PROTO: dict[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    FinishReason.MIGRATED: pb.FINISH_REASON_MIGRATED,
    FinishReason.REROUTED: pb.FINISH_REASON_REROUTED,
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}

_GRAMMAR_TO_PROTO: dict[GrammarKind, pb.GrammarKind] = {
    GrammarKind.JSON_OBJECT: pb.GRAMMAR_KIND_JSON_OBJECT,
    GrammarKind.JSON_SCHEMA: pb.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: pb.GRAMMAR_KIND_REGEX,
    GrammarKind.CHOICE: pb.GRAMMAR_KIND_CHOICE,
    GrammarKind.LARK: pb.GRAMMAR_KIND_LARK,
    GrammarKind.TOKEN_RULES: pb.GRAMMAR_KIND_TOKEN_RULES,
}
_GRAMMAR_FROM_PROTO = {value: key for key, value in _GRAMMAR_TO_PROTO.items()}


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
    )
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.prompt_logprobs is not None:
        message.prompt_logprobs = params.prompt_logprobs
    if params.grammar is not None:
        message.grammar.CopyFrom(grammar_to_proto(params.grammar))
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Decode sampling parameters. Raises Invalid for a grammar of an unknown kind."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted((TokenId(t), b) for t, b in message.logit_bias.items())),
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        stop_token_ids=_tokens(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        min_tokens=message.min_tokens,
    )


def grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(kind=_GRAMMAR_TO_PROTO[grammar.kind], text=grammar.text)


def grammar_from_proto(message: pb.Grammar) -> Grammar:
    """Decode a grammar. Raises Invalid for an unknown kind of grammar."""
    kind = _GRAMMAR_FROM_PROTO.get(message.kind)
    if kind is None:
        raise Invalid(
            f"unknown kind of grammar {message.kind}: this version of Baton does not support it",
            param="grammar",
        )
    return Grammar(kind, message.text)


def spec_to_proto(spec: RequestSpec) -> pb.RequestSpec:
    return pb.RequestSpec(
        request_id=spec.request_id,
        epoch=spec.epoch,
        token_ids=spec.token_ids,
        num_prompt_tokens=spec.num_prompt_tokens,
        sampling=sampling_to_proto(spec.sampling),
        tenant_salt=spec.tenant_salt,
        store_hint=hint_to_proto(spec.store_hint),
        ttft_slo_seconds=spec.ttft_slo_seconds,
        tenant=spec.tenant,
        priority=spec.priority,
        weight=spec.weight,
        trace=spec.trace,
        adapter=adapter_to_proto(spec.adapter),
        kv_codec=codec_to_proto(spec.kv_codec),
        exact_kv=spec.exact_kv,
        attention_window=attention_window_to_proto(spec.attention_window),
        variant=spec.variant,
    )


def spec_from_proto(message: pb.RequestSpec) -> RequestSpec:
    """Decode a request. Raises Invalid for a request id that is empty or too long; for counts,
    times, priorities and weights out of range; for a tenant tag that is too long; for an unknown
    kind of grammar; and for an invalid adapter or attention window. A weight of 0 means 1; a
    traceparent of the wrong length is dropped."""
    if not 0 < len(message.request_id) <= MAX_ID_BYTES:
        raise Invalid(f"request_id must have 1 to {MAX_ID_BYTES} characters", param="request_id")
    if not 0 < message.num_prompt_tokens <= len(message.token_ids):
        raise Invalid("num_prompt_tokens must be in 1..len(token_ids)", param="num_prompt_tokens")
    if not message.sampling.max_tokens:
        raise Invalid("max_tokens must be at least 1", param="max_tokens")
    if not 0 <= message.ttft_slo_seconds < math.inf:
        raise Invalid("ttft_slo_seconds must be finite and at least 0", param="ttft_slo_seconds")
    _check_tenant_fields(message)
    return RequestSpec(
        request_id=RequestId(message.request_id),
        epoch=Epoch(message.epoch),
        token_ids=_tokens(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_proto(message.sampling),
        tenant_salt=message.tenant_salt,
        store_hint=hint_from_proto(message.store_hint),
        ttft_slo_seconds=message.ttft_slo_seconds,
        tenant=message.tenant,
        priority=Priority(message.priority),
        weight=message.weight or 1.0,
        trace=message.trace if len(message.trace) == TRACEPARENT_LENGTH else "",
        adapter=adapter_from_proto(message.adapter) if message.HasField("adapter") else None,
        kv_codec=codec_from_proto(message.kv_codec),
        exact_kv=message.exact_kv,
        attention_window=attention_window_from_proto(message.attention_window)
        if message.HasField("attention_window")
        else None,
        variant=message.variant,
    )


def attention_window_to_proto(window: AttentionWindow | None) -> pb.AttentionWindow | None:
    if window is None:
        return None
    return pb.AttentionWindow(sink_tokens=window.sink_tokens, recent_tokens=window.recent_tokens)


def attention_window_from_proto(message: pb.AttentionWindow) -> AttentionWindow:
    """Decode a window. Raises Invalid if a number is out of range."""
    window = AttentionWindow(message.sink_tokens, message.recent_tokens)
    if not window.is_valid:
        raise Invalid(
            f"attention_window has sink_tokens {window.sink_tokens} and recent_tokens "
            f"{window.recent_tokens}: they must be at most {MAX_WINDOW_TOKENS}, and recent_tokens "
            "at least 1",
            param="attention_window",
        )
    return window


def adapter_to_proto(adapter: AdapterRef | None) -> pb.Adapter | None:
    return None if adapter is None else pb.Adapter(name=adapter.name, digest=adapter.digest)


def adapter_from_proto(message: pb.Adapter) -> AdapterRef:
    """Decode an adapter's identity. Raises Invalid for an invalid name, or for a digest of the
    wrong size."""
    if not is_adapter_name(message.name) or len(message.digest) != ADAPTER_DIGEST_BYTES:
        raise Invalid(
            f"an adapter must have a valid name and a digest of {ADAPTER_DIGEST_BYTES} bytes",
            param="adapter",
        )
    return AdapterRef(message.name, message.digest)


def _check_tenant_fields(message: pb.RequestSpec) -> None:
    """Check tenant, priority and weight. Raises Invalid."""
    if len(message.tenant) > TAG_BYTES:
        raise Invalid(f"tenant must have at most {TAG_BYTES} bytes", param="tenant")
    if not Priority.HIGH <= message.priority <= Priority.BATCH:
        raise Invalid(f"priority must be in {Priority.HIGH}..{Priority.BATCH}", param="priority")
    if not 0 <= message.weight < math.inf:
        raise Invalid("weight must be finite and at least 0", param="weight")


def output_to_proto(output: RequestOutput) -> pb.RequestOutput:
    """Encode an output. All fields but the token are set only if they are not empty, since in
    nearly all outputs they are empty."""
    message = pb.RequestOutput(
        request_id=output.request_id,
        epoch=output.epoch,
        first_index=output.first_index,
        token_ids=output.token_ids,
    )
    if output.logprobs:
        message.logprobs.extend(map(_logprob_to_proto, output.logprobs))
    if output.finish_reason is not None:
        message.finish_reason = _FINISH_TO_PROTO[output.finish_reason]
    if output.error:
        message.error = output.error
    if output.details:
        message.error_status = output.details.get("error_status", "")
        message.details.update(output.details)
    if output.cached_tokens:
        message.cached_tokens = output.cached_tokens
    if output.prompt_logprobs:
        message.prompt_logprobs.extend(map(_logprob_to_proto, output.prompt_logprobs))
    return message


def output_from_proto(message: pb.RequestOutput) -> RequestOutput:
    """Decode an output. Nearly all outputs have the next token and nothing else, so the other
    fields are converted only if any of them is set. Raises Invalid for an unknown finish reason and
    for malformed logprobs."""
    try:
        reason = _FINISH_FROM_PROTO[message.finish_reason]
    except KeyError as error:
        raise Invalid(
            f"unknown finish reason {message.finish_reason}: the worker has another version of "
            "Baton"
        ) from error
    output = RequestOutput(
        message.request_id,  # type: ignore[arg-type]
        message.epoch,  # type: ignore[arg-type]
        message.first_index,
        tuple(message.token_ids),  # type: ignore[arg-type]
        finish_reason=reason,
    )
    if output.finish_reason is None and not (
        message.details or message.logprobs or message.cached_tokens or message.prompt_logprobs
    ):
        return output
    _check_size(message)
    details = dict(message.details)
    if message.error_status:
        details["error_status"] = message.error_status
    return replace(
        output,
        logprobs=tuple(_logprob_from_proto(entry) for entry in message.logprobs),
        error=message.error,
        cached_tokens=message.cached_tokens,
        details=details,
        prompt_logprobs=tuple(_logprob_from_proto(entry) for entry in message.prompt_logprobs),
    )


def _check_size(message: pb.RequestOutput) -> None:
    """Raise Invalid if the output has more logprobs than a request may ask for, or more than
    ``MAX_DETAILS`` entries in the map ``details``: decoding them would delay all other requests."""
    scores = message.prompt_logprobs
    if (
        len(message.logprobs) > len(message.token_ids)
        or any(len(entry.top_token_ids) > MAX_LOGPROBS for entry in message.logprobs)
        or len(scores) > MAX_PROMPT_LOGPROBS
        or sum(1 + len(entry.top_token_ids) for entry in scores) > MAX_PROMPT_LOGPROBS
    ):
        raise Invalid("the output has more logprobs than a request may ask for", param="logprobs")
    if len(message.details) > MAX_DETAILS:
        raise Invalid(
            f"the map `details` of an output must have at most {MAX_DETAILS} entries, not "
            f"{len(message.details)}",
            param="details",
        )


def hint_to_proto(hint: StoreHint | None) -> pb.StoreHint | None:
    return None if hint is None else pb.StoreHint(node=hint.node, num_blocks=hint.num_blocks)


def hint_from_proto(message: pb.StoreHint) -> StoreHint | None:
    return StoreHint(WorkerId(message.node), message.num_blocks) if message.node else None


def ref_to_proto(ref: WorkerRef) -> pb.WorkerRef:
    return pb.WorkerRef(
        id=ref.id,
        address=ref.address,
        generation=ref.generation,
        framed_address=ref.framed_address,
    )


def ref_from_proto(message: pb.WorkerRef) -> WorkerRef:
    return _ref(message.id, message.address, message.generation, message.framed_address)


@lru_cache(MAX_CACHED_REFS)
def _ref(worker_id: str, address: str, generation: int, framed_address: str) -> WorkerRef:
    """Return the reference to a worker; cached, so that all requests to the worker share it."""
    return WorkerRef(WorkerId(worker_id), address, Incarnation(generation), framed_address)


def endpoint_to_proto(endpoint: Endpoint) -> pb.Endpoint:
    return pb.Endpoint(
        transport=endpoint.transport,
        owner=endpoint.owner,
        generation=endpoint.generation,
        host=endpoint.host,
        region_size_bytes=endpoint.region_size_bytes,
        metadata=endpoint.metadata,
    )


def endpoint_from_proto(message: pb.Endpoint) -> Endpoint:
    return Endpoint(
        transport=message.transport,
        owner=message.owner,
        generation=message.generation,
        host=message.host,
        region_size_bytes=message.region_size_bytes,
        metadata=message.metadata,
    )


def block_to_proto(block: BlockRef) -> pb.BlockRef:
    return pb.BlockRef(
        offset_bytes=block.offset_bytes,
        size_bytes=block.size_bytes,
        checksum=block.checksum,
        key=block.key,
        codec=codec_to_proto(block.codec),
    )


def block_from_proto(message: pb.BlockRef) -> BlockRef:
    """Decode a block reference. Raises Invalid unless its key is empty or has 16 bytes."""
    if len(message.key) not in (0, BLOCK_KEY_BYTES):
        raise Invalid(
            f"a block key must have {BLOCK_KEY_BYTES} bytes, not {len(message.key)}", param="key"
        )
    return BlockRef(
        offset_bytes=message.offset_bytes,
        size_bytes=message.size_bytes,
        checksum=message.checksum,
        key=BlockKey(message.key),
        codec=codec_from_proto(message.codec),
    )


def codec_to_proto(codec: KvCodecName) -> str:
    return "" if codec is KvCodecName.NONE else codec.value


def codec_from_proto(name: str) -> KvCodecName:
    """Raises Invalid for the name of a codec that does not exist."""
    try:
        return KvCodecName(name) if name else KvCodecName.NONE
    except ValueError as error:
        known = ", ".join(KvCodecName)
        raise Invalid(f"kv codec {name!r} is unknown; known are {known}", param="codec") from error


def _tokens(values: Iterable[int]) -> tuple[TokenId, ...]:
    return cast(tuple[TokenId, ...], tuple(values))


def _logprob_to_proto(entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )


def _logprob_from_proto(message: pb.TokenLogprob) -> TokenLogprob:
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise Invalid("top_token_ids and top_logprobs must have the same length", param="logprobs")
    top = zip(_tokens(message.top_token_ids), message.top_logprobs, strict=True)
    return TokenLogprob(TokenId(message.token_id), message.logprob, tuple(top))
