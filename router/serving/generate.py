"""How a request that generates answers is handled, from its parsed body to the last byte."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.errors import BatonError, Conflict
from router.errors import ApiError, to_api_error
from router.generation.record import GenerationRecord
from router.http.response_writer import JSON_HEADERS
from router.serving.answer_encoder import AnswerEncoder
from router.serving.chat_renderer import ChatRenderer
from router.serving.choice_result import ChoiceResult
from router.serving.choices import create_choice_streams, preprocessor, request_context
from router.serving.delivery import AnswerDelivery
from router.serving.event_cursor import LAST_EVENT_ID
from router.serving.grammar_validator import TOOLS_FIELD, grammar_parts
from router.serving.kept_answers import AnswerOrigin
from router.serving.parsers.model_output_format import tool_format_headers
from router.serving.preprocessor import Preprocessor, Prompt, count_prompt_logprobs
from router.serving.request import Chat, GenerationRequest
from router.serving.request_handler import IncomingRequest
from router.serving.resumption import ResumableAnswer
from router.serving.served_model import ServedModel
from router.tenants.admission import DEFAULT_RESERVED_OUTPUT_TOKENS, num_reserved_tokens

MAX_BYTES_PER_PROMPT_TOKEN = 16
"""If a body has more bytes than this per prompt token, the excess belongs to parts of the body that
are not in the prompts, such as tools that are not offered. These bytes count against the body
budget until the answer ends: nothing else bounds how many such bodies stay in memory, where they
take a multiple of their size."""

COMMENT_PING = b": ping\n\n"


class AnswerKeeper(Protocol):
    """Keeps the answer to a request for later requests."""

    @property
    def is_background(self) -> bool:
        """Whether the answer is only kept: the client does not wait for it."""
        ...

    async def keep(self, encoder: AnswerEncoder, failure: ApiError | None = None) -> None:
        """Keep an answer that is complete, or that has failed after its response began."""
        ...

    async def start(
        self, encoder: AnswerEncoder, generate: Callable[[], Awaitable[bytes]], held: ExitStack
    ) -> bytes:
        """Start to generate an answer in the background, and return the response that says so.
        ``held`` is what the request holds until its end."""
        ...


@dataclass(slots=True)
class ParsedRequest:
    """A request of one API. ``create_encoder`` creates the encoder of its answers, for prompts and
    for the records of the answers."""

    request: GenerationRequest
    create_encoder: Callable[[Sequence[Prompt], Sequence[GenerationRecord]], AnswerEncoder]
    keeper: AnswerKeeper | None = None


async def generate(
    incoming: IncomingRequest,
    *,
    id_prefix: str,
    parse: Callable[[IncomingRequest], Awaitable[ParsedRequest]],
    ping: bytes = COMMENT_PING,
) -> None:
    """Answer a request. ``parse`` parses its body; ``ping`` is what a
    stream contains from time to time, so that it is not silent: a comment, which clients skip, or
    an event of the API. Raises ApiError or BatonError."""
    context, writer = incoming.context, incoming.writer
    arrived_at = context.clock.monotonic()
    incoming.begin(f"{id_prefix}{context.ids.new_id()}")

    parsed = await parse(incoming)
    request, model, tenant, keeper = parsed.request, incoming.model, incoming.tenant, parsed.keeper
    check_generates(model)
    seed, worker_id, resumable = context.ids.new_seed(), incoming.id, None
    if keeper is None or not keeper.is_background:
        resumable = await _claim(incoming, request, seed)
    if resumable is not None:
        seed, worker_id = resumable.origin.seed, resumable.request_id
    if request.tools.offered:
        incoming.headers |= tool_format_headers(model.text.output_format)
    if request.stream:
        writer.start_pings(incoming.headers, ping)

    attributes = request_context(
        context, model, tenant, request, incoming.id, incoming.min_priority
    )
    prompts = await _prepare(incoming, request, preprocessor(attributes, seed))
    await _reserve_tokens(incoming, request, prompts)
    choices = create_choice_streams(context, worker_id, attributes, request, prompts, arrived_at)
    cursor = None if resumable is None else resumable.attach(choices, request)
    records = [choice.record for choice in choices]
    incoming.admission.set_records(records, request.num_candidates)
    if incoming.trace is not None:
        incoming.trace.set_records(records, context.clock.monotonic())

    encoder = parsed.create_encoder(prompts, records)
    incoming.encode_failure = encoder.encode_failure
    candidates = [prompt for prompt in prompts for _ in range(request.num_candidates)]
    answers = [
        ChoiceResult(index, prompt.token_ids, prompt.echo_text)
        for index, prompt in enumerate(candidates)
    ]
    param = request.prompt.names.top_logprobs
    with context.kept_logprobs(tenant, param) as kept_logprobs:
        kept_logprobs.charge(count_prompt_logprobs(prompts, request))
        delivery = AnswerDelivery(
            context,
            tenant,
            request,
            choices,
            answers,
            encoder,
            kept_logprobs,
            incoming.headers,
            cursor,
        )
        if keeper is not None and keeper.is_background:
            held = incoming.detach()
            held.callback(kept_logprobs.detach())
            await incoming.respond(await keeper.start(encoder, delivery.generate, held))
            return
        async with nullcontext() if resumable is None else resumable.connected(incoming.admission):
            try:
                data = await (delivery.stream(writer) if request.stream else delivery.generate())
                if keeper is not None:
                    await keeper.keep(encoder)
                if request.stream:
                    await writer.end(data)
                else:
                    headers = JSON_HEADERS | delivery.debug_headers(choices[0])
                    await writer.respond(200, headers, data)
            except (BatonError, ApiError) as error:
                is_known = writer.has_started  # the client knows the answer's id
                if keeper is not None and is_known and not isinstance(error, Conflict):
                    await keeper.keep(encoder, to_api_error(error))
                raise


async def _claim(
    incoming: IncomingRequest, request: GenerationRequest, seed: int
) -> ResumableAnswer | None:
    """Find the answer that an earlier request with the same key got, or keep this one's. Returns
    None for a request without a key. Raises ApiError (400, 404, 422) or Unavailable."""
    resume, resumption = incoming.resume, incoming.context.resumption
    if resume is None or resumption is None:
        return None
    if resume.last_event_id and not request.stream:
        raise ApiError(400, f"{LAST_EVENT_ID} continues a stream, but this request has none")
    origin = AnswerOrigin(incoming.id, incoming.unix_seconds, seed)
    answer = await resumption.claim(incoming.tenant, resume, incoming.body_digest, origin)
    if answer is not None:
        incoming.id, incoming.created = answer.origin.id, answer.origin.created
        incoming.headers["x-baton-request-id"] = answer.request_id
    return answer


async def _prepare(
    incoming: IncomingRequest, request: GenerationRequest, prepare: Preprocessor
) -> list[Prompt]:
    """Build the prompts, free the body, and check the grammar. Raises ApiError or Invalid."""
    prompts = await incoming.tokenize(lambda: _build_prompts(incoming, request, prepare))
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    raw, validator = incoming.raw, incoming.model.text.grammar_validator
    raw.release(kept_bytes=raw.size_bytes - num_tokens * MAX_BYTES_PER_PROMPT_TOKEN)
    incoming.report_ignored_fields()
    field = request.format[0] if request.format is not None else TOOLS_FIELD
    grammar = prompts[0].sampling.grammar
    await validator.check(grammar, field, incoming.tenant, grammar_parts(request))
    return prompts


def check_generates(model: ServedModel) -> None:
    """Raise ApiError (400) if the servers of the model generate no tokens."""
    if not model.workers.generates:
        offered = ", ".join(model.workers.paths(()))
        message = f"the model {model.shown_name!r} generates nothing; its servers have {offered}"
        raise ApiError(400, message, param="model", code="unsupported_endpoint")


def _build_prompts(
    incoming: IncomingRequest, request: GenerationRequest, prepare: Preprocessor
) -> list[Prompt]:
    """Build the prompts. Raises ApiError or Invalid, which name the invalid field."""
    chat, text = request.prompt, incoming.model.text
    if isinstance(chat, Chat):
        if incoming.context.config.refuses_special_tokens:
            text.special_tokens.check(chat.messages, chat.names)
        ChatRenderer(text.tokenizer).drop_ineffective_fields(chat, incoming.ignored)
    return prepare.prepare(request)


async def _reserve_tokens(
    incoming: IncomingRequest, request: GenerationRequest, prompts: Sequence[Prompt]
) -> None:
    """Reserve the request's tokens within the tenant's limits. Raises RateLimited or Overloaded."""
    admission, models, model = incoming.admission, incoming.context.models, incoming.model
    admission.set_size(incoming.raw.size_bytes)
    asked = request.max_tokens or DEFAULT_RESERVED_OUTPUT_TOKENS
    answer = min(asked, max(prompt.sampling.max_tokens for prompt in prompts))
    sizes = [len(prompt.token_ids) for prompt in prompts]
    await admission.draw_token_quota(num_reserved_tokens(sizes, request.num_candidates, answer))
    field = request.prompt.names.max_tokens
    admission.reserve_tokens(sizes, request.num_candidates, answer, field)
    admission.take_model_slots(partial(models.acquire, model), partial(models.release, model))
    incoming.headers |= admission.headers()
