"""The endpoints of OpenAI's chats and completions, and vLLM's for tokenizing."""

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import orjson

from baton.text.tokenizer import Tokenizer
from router.forwarding.body import may_have_media
from router.forwarding.forward import forward_chat
from router.generation.record import GenerationRecord
from router.limits import UNCHECKED_BYTES
from router.openai.encoders.chat import ChatEncoder
from router.openai.encoders.completion import CompletionEncoder
from router.openai.encoders.encoder import ResponseMetadata
from router.openai.schema.chat import ChatBody
from router.openai.schema.completion import CompletionBody
from router.openai.schema.generation_body import GenerationBody
from router.openai.schema.tokenize import DetokenizeBody, TokenizeBody
from router.serving.chat_renderer import ChatRenderer
from router.serving.generate import ParsedRequest, generate
from router.serving.preprocessor import (
    ModelLimits,
    Prompt,
    check_token_ids,
    encode_within_limit,
    too_many_tokens,
)
from router.serving.request_handler import Endpoint, IncomingRequest


def answer_chat(incoming: IncomingRequest) -> Coroutine[Any, Any, None]:
    """Answer a chat: one with images, audio or video by an attached server, if there is one."""
    raw = incoming.raw
    if raw.size_bytes <= UNCHECKED_BYTES and not may_have_media(raw.data):
        return _generate_chat(incoming)  # without a coroutine of its own, which every token passes
    return _answer_media_chat(incoming)


async def _answer_media_chat(incoming: IncomingRequest) -> None:
    if not await forward_chat(incoming):
        await _generate_chat(incoming)


def _generate_chat(incoming: IncomingRequest) -> Coroutine[Any, Any, None]:
    return generate(incoming, id_prefix="chatcmpl-", parse=parse_chat)


async def parse_chat(incoming: IncomingRequest) -> ParsedRequest:
    body, request = await incoming.parse(ChatBody, ChatBody.request)

    def create_encoder(
        _prompts: Sequence[Prompt], records: Sequence[GenerationRecord]
    ) -> ChatEncoder:
        text = incoming.model.text
        return ChatEncoder(
            _metadata(incoming, body, records),
            text.tokenizer,
            with_logprobs=request.num_logprobs is not None,
            call_id=partial(text.output_format.call_id, incoming.id),
        )

    return ParsedRequest(request, create_encoder)


async def parse_completion(incoming: IncomingRequest) -> ParsedRequest:
    body, request = await incoming.parse(CompletionBody, CompletionBody.request)

    def create_encoder(
        _prompts: Sequence[Prompt], records: Sequence[GenerationRecord]
    ) -> CompletionEncoder:
        return CompletionEncoder(
            _metadata(incoming, body, records),
            incoming.model.text.tokenizer,
            with_logprobs=request.num_logprobs is not None,
        )

    return ParsedRequest(request, create_encoder)


def _metadata(
    incoming: IncomingRequest, body: GenerationBody, records: Sequence[GenerationRecord]
) -> ResponseMetadata:
    return ResponseMetadata(
        id=incoming.id,
        created=incoming.unix_seconds,
        model=incoming.model.shown_name,
        return_token_ids=bool(body.return_token_ids),
        has_usage_chunk=body.wants_usage_chunk,
        has_running_usage=body.wants_running_usage,
        echoes_logprobs=isinstance(body, CompletionBody) and bool(body.echo),
        prompt_logprobs=body.prompt_logprobs is not None,
        is_obfuscated=body.wants_obfuscation,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        records=records,
        service_tier="default" if isinstance(body, ChatBody) and body.service_tier else None,
    )


async def tokenize(incoming: IncomingRequest) -> None:
    body, chat = await incoming.parse(TokenizeBody, TokenizeBody.to_chat)
    tokenizer, limits = incoming.model.text.tokenizer, incoming.model.limits
    if chat is not None:
        ChatRenderer(tokenizer).drop_ineffective_fields(chat, incoming.ignored)
        incoming.report_ignored_fields()

    def encode() -> bytes:
        if chat is None:
            text, param, special = body.prompt or "", "prompt", body.add_special_tokens is not False
        else:
            text = ChatRenderer(tokenizer).render(chat, limits.max_chat_characters)
            param, special = chat.names.prompt, chat.adds_special_tokens
        ids = encode_within_limit(text, param, special, tokenizer, limits)
        answer = {"count": len(ids), "max_model_len": limits.context_tokens, "tokens": ids}
        return orjson.dumps(answer)

    await incoming.respond(await incoming.tokenize(encode))


async def detokenize(incoming: IncomingRequest) -> None:
    body, _ = await incoming.parse(DetokenizeBody, lambda body: None)
    tokenizer, limits = incoming.model.text.tokenizer, incoming.model.limits
    data = await incoming.context.resources.offload_executor.run(
        incoming.tenant,
        incoming.raw.size_bytes,
        lambda: _encode_text_of(body.tokens, tokenizer, limits),
    )
    await incoming.respond(data)


def _encode_text_of(ids: Sequence[int], tokenizer: Tokenizer, limits: ModelLimits) -> bytes:
    check_token_ids(ids, limits.vocab_size, "tokens")
    if len(ids) > limits.max_request_tokens:
        raise too_many_tokens("tokens", limits.max_request_tokens)
    return orjson.dumps({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})


CHATS = Endpoint("chat", answer_chat)
COMPLETIONS = Endpoint("completions", partial(generate, id_prefix="cmpl-", parse=parse_completion))
TOKENIZE = Endpoint("tokenize", tokenize)
DETOKENIZE = Endpoint("detokenize", detokenize)
