"""Creates the answers of a request, runs them to their ends, and records their outcome."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import structlog

from baton.core.attention_window import AttentionWindow
from baton.core.ids import Epoch, RequestId, TenantId
from baton.core.request import RequestSpec
from baton.core.variant import Variant
from baton.errors import BatonError, Conflict, Invalid, Overloaded
from baton.text.tokenizer import Tokenizer
from router.generation.block_key_hasher import BlockKeyHasher, block_key_hasher
from router.generation.generation import Generation
from router.generation.record import GenerationRecord
from router.serving.choice_stream import (
    ChoiceStream,
    DeltaHandler,
    InlineSink,
    PromptLogprobsBuilder,
    build_prompt_token_entries,
)
from router.serving.context import RouterContext
from router.serving.parsers.output_parser import OutputParser
from router.serving.preprocessor import Preprocessor, Prompt
from router.serving.request import Chat, GenerationRequest
from router.serving.served_model import ModelText, ServedModel
from router.tenants.tenant import TenantAttributes

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The model and the tenant of a request, and the tenant's attributes as of the request's
    arrival. ``variant`` is the variant of the model that is tried first, for which the block keys
    of the request's prompts are computed; it is None while the model has no workers. ``session`` is
    the id of the client's session, or empty if the client named none."""

    model: ServedModel
    tenant: TenantId
    attributes: TenantAttributes
    variant: Variant | None
    session: str = ""
    attention_window: AttentionWindow | None = None

    @property
    def hasher(self) -> BlockKeyHasher | None:
        """Computes the block keys of the request's prompts; None without a variant."""
        if self.variant is None:
            return None
        adapter, attributes = self.model.adapter, self.attributes
        return block_key_hasher(
            self.variant,
            attributes.salt,
            b"" if adapter is None else adapter.digest,
            self.attention_window,
            exact_kv=attributes.exact_kv,
        )


def make_session_id(tenant: TenantId, cache_key: str | None) -> str:
    """Return a short id for the session of all of the tenant's requests with this
    ``prompt_cache_key``, or an empty string if there is no key."""
    if not cache_key:
        return ""
    salted_key = f"{tenant}/{cache_key}".encode(errors="replace")
    return hashlib.blake2b(salted_key, digest_size=12).hexdigest()


def request_context(
    context: RouterContext,
    model: ServedModel,
    tenant: TenantId,
    request: GenerationRequest,
    request_id: str,
    min_priority: int = 0,
) -> RequestContext:
    """Return the context of a request. It keeps the tenant's attributes and the variant as they are
    now, since the tenants file and the workers may change later. ``min_priority`` is how many steps
    at least the request's priority is below its tenant's."""
    given = request.sampling
    attributes = context.tenants.authenticator.directory.tenant(tenant).attributes(
        context.config.tenant_secret,
        given.cache_salt,
        max(given.priority or 0, min_priority),
        exact_kv=bool(given.exact_kv),
    )
    session = make_session_id(tenant, request.cache_key)
    window = None if given.attention_window is None else given.attention_window.window
    variant = next(iter(model.workers.rank_variants(session or request_id)), None)
    return RequestContext(model, tenant, attributes, variant, session, window)


def preprocessor(request_context: RequestContext, seed: int) -> Preprocessor:
    """Return the preprocessor of a request. ``seed`` is used if the client sends none."""
    model = request_context.model
    return Preprocessor(
        model.text.tokenizer,
        model.text.output_format,
        model.limits,
        request_context.hasher,
        seed,
        model.sampling_defaults,
    )


def create_choice_streams(
    context: RouterContext,
    request_id: str,
    request_context: RequestContext,
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    arrived_at: float,
) -> list[ChoiceStream]:
    """Create a stream for each answer to each prompt, in the order of the answers' indexes."""
    model, tenant = request_context.model, request_context.tenant
    attributes, variant = request_context.attributes, request_context.variant
    total = len(prompts) * request.num_candidates
    choices: list[ChoiceStream] = []
    create_parser = _parser_factory(model.text, request)
    for prompt in prompts:
        for number in range(request.num_candidates):
            name = request_id if total == 1 else f"{request_id}-{len(choices)}"
            size = len(prompt.token_ids)
            record = GenerationRecord(
                RequestId(name),
                arrived_at,
                size,
                tenant,
                attributes.has_slo,
                model=model.name,
                variant=variant,
                exact_kv=attributes.exact_kv,
            )
            if prompt.prefix_pins and number == 0 and model.prefix_pinner is not None:
                model.prefix_pinner.pin_when_stored(record, prompt.prefix_pins)
            spec = _request_spec(prompt, name, number, attributes, context.config.slo_ttft_seconds)
            window = request_context.attention_window
            if model.adapter is not None or window is not None:
                spec = replace(spec, adapter=model.adapter, attention_window=window)
            generation = Generation(
                model.generation_context,
                spec,
                tenant,
                model.name,
                variant,
                prompt.block_keys,
                record,
                request_context.session,
            )
            choices.append(
                _create_choice_stream(
                    model.text, len(choices), generation, request, prompt, create_parser(prompt)
                )
            )
    context.telemetry.history.add_records(request_id, [choice.record for choice in choices])
    return choices


async def run_choices(
    context: RouterContext,
    choices: Sequence[ChoiceStream],
    per_prompt: int,
    emit: DeltaHandler,
    sink: InlineSink | None = None,
) -> None:
    """Run all streams of a request to their ends: ``per_prompt`` consecutive ones for each of
    its prompts. The first failure cancels the others, and is raised."""
    try:
        if len(choices) == 1:
            await _run_choice(context, choices[0], emit, sink)
        else:
            await _run_together(context, choices, emit, sink)
    finally:
        records = [choice.record for choice in choices]
        context.telemetry.metrics.record_request(records, per_prompt)


async def _run_together(
    context: RouterContext,
    choices: Sequence[ChoiceStream],
    emit: DeltaHandler,
    sink: InlineSink | None,
) -> None:
    failure: BatonError | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            for choice in choices:
                tasks.create_task(_run_choice(context, choice, emit, sink))
    except* BatonError as group:
        failure = _first_leaf_error(group)
    if failure is not None:
        raise failure


async def _run_choice(
    context: RouterContext, choice: ChoiceStream, emit: DeltaHandler, sink: InlineSink | None
) -> None:
    with recorded_answer(context, choice.record):
        choice.record.record_end(await choice.run(emit, sink), context.clock.monotonic())


@contextmanager
def recorded_answer(context: RouterContext, record: GenerationRecord) -> Iterator[None]:
    """In the ``with`` block an answer is in progress. Record exactly one terminal state: the one
    that the block records, or else error or cancelled."""
    context.telemetry.metrics.record_begin(record)
    context.telemetry.history.begin(record)
    try:
        yield
    except BatonError as error:
        record.record_end("error", context.clock.monotonic(), str(error))
        _log_failure(record, error)
        raise
    except asyncio.CancelledError:
        record.record_end("cancelled", context.clock.monotonic())
        raise
    finally:
        record.record_end("error", context.clock.monotonic(), "internal error")
        context.telemetry.history.end(record)
        context.telemetry.metrics.record_answer(record)


def _parser_factory(
    text: ModelText, request: GenerationRequest
) -> Callable[[Prompt], OutputParser | None]:
    """Return a function that creates a parser for an answer to a prompt; answers to texts are not
    parsed."""
    if not isinstance(request.prompt, Chat):
        return lambda prompt: None
    tools = request.prompt.tools
    return lambda prompt: text.output_format.create_parser(
        tools.offered,
        forced=tools.is_forced,
        in_reasoning=prompt.starts_in_reasoning,
        max_calls=tools.max_calls,
    )


def _create_choice_stream(
    text: ModelText,
    index: int,
    generation: Generation,
    request: GenerationRequest,
    prompt: Prompt,
    parser: OutputParser | None,
) -> ChoiceStream:
    shown_special_ids = (
        text.output_format.visible_special_ids if parser is not None else frozenset[int]()
    )
    if request.sampling.skip_special_tokens is False:
        shown_special_ids = text.tokenizer.special_ids
    return ChoiceStream(
        index,
        generation,
        text.tokenizer.make_detokenizer(shown_special_ids),
        request.sampling.stop,
        emit_every_step=request.return_token_ids or request.num_logprobs is not None,
        parser=parser,
        include_stop=bool(request.sampling.include_stop_str_in_output),
        build_prompt_logprobs=_prompt_logprobs_builder(prompt, text.tokenizer),
        offset=len(prompt.echo_text),
        prompt_only=prompt.prompt_only,
        shows_logprobs=request.num_logprobs is not None,
    )


def _prompt_logprobs_builder(prompt: Prompt, tokenizer: Tokenizer) -> PromptLogprobsBuilder | None:
    if prompt.sampling.prompt_logprobs is None:
        return None
    return partial(build_prompt_token_entries, prompt.token_ids, tokenizer)


def _request_spec(
    prompt: Prompt, name: str, number: int, attributes: TenantAttributes, ttft_slo_seconds: float
) -> RequestSpec:
    sampling = prompt.sampling
    if number:
        sampling = replace(sampling, seed=(sampling.seed + number) % 2**64)
    return RequestSpec(
        request_id=RequestId(name),
        epoch=Epoch(1),
        token_ids=prompt.token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        sampling=sampling,
        tenant_salt=attributes.salt,
        ttft_slo_seconds=ttft_slo_seconds if attributes.has_slo else 0.0,
        tenant=attributes.tag,
        priority=attributes.priority,
        weight=attributes.weight,
        exact_kv=attributes.exact_kv,
    )


def _log_failure(record: GenerationRecord, error: BatonError) -> None:
    """Log a refusal at level info, since the client sent an invalid request or may retry; log any
    other error as a warning."""
    is_refusal = isinstance(error, Conflict | Overloaded | Invalid)
    write, event = (log.info, "request_refused") if is_refusal else (log.warning, "request_failed")
    write(event, error=str(error), placements=len(record.placements), **record.log_fields)


def _first_leaf_error(group: BaseExceptionGroup[BatonError]) -> BatonError:
    first = group.exceptions[0]
    return _first_leaf_error(first) if isinstance(first, BaseExceptionGroup) else first
