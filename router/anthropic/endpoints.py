"""The endpoints of Anthropic's API."""

from collections.abc import Sequence
from functools import partial

import orjson

from router.anthropic.errors import encode_error, encode_error_event
from router.anthropic.message_encoder import PING, CacheBreakpoints, MessageEncoder
from router.anthropic.schema import CountTokensBody, MessagesBody
from router.generation.record import GenerationRecord
from router.serving.generate import ParsedRequest, generate
from router.serving.preprocessor import Prompt, count_prompt_tokens
from router.serving.request_handler import Endpoint, ErrorForm, IncomingRequest

CALL_ID_PREFIX = "toolu_"


async def parse_message(incoming: IncomingRequest) -> ParsedRequest:
    body, request = await incoming.parse(MessagesBody, MessagesBody.request)
    incoming.report_ignored_fields(body.ignored_fields)

    def create_encoder(
        prompts: Sequence[Prompt], _records: Sequence[GenerationRecord]
    ) -> MessageEncoder:
        model, message_id, prompt = incoming.model, incoming.id, prompts[0]
        output_format = model.text.output_format
        return MessageEncoder(
            message_id,
            model.shown_name,
            call_id=lambda call: output_format.call_id(message_id, 0, call, CALL_ID_PREFIX),
            encode_failure=incoming.encode_failure,
            breakpoints=CacheBreakpoints.of(prompt.prefix_pins),
            is_capped=prompt.sampling.max_tokens < body.max_tokens,
            hides_thinking=body.hides_thinking,
        )

    return ParsedRequest(request, create_encoder)


async def count_tokens(incoming: IncomingRequest) -> None:
    body, chat = await incoming.parse(CountTokensBody, CountTokensBody.to_chat)
    incoming.report_ignored_fields(body.ignored_fields)
    text, limits = incoming.model.text, incoming.model.limits
    count = await incoming.tokenize(
        lambda: count_prompt_tokens(chat, text.tokenizer, text.output_format, limits)
    )
    await incoming.respond(orjson.dumps({"input_tokens": count}))


ERRORS = ErrorForm(encode_error, encode_error_event, request_id_header="request-id")
MESSAGES = Endpoint(
    "messages",
    partial(generate, id_prefix="msg_", parse=parse_message, ping=PING),
    ERRORS,
)
COUNT_TOKENS = Endpoint("count_tokens", count_tokens, ERRORS)
