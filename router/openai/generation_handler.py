"""Handles requests that generate answers, and accounts for their usage."""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from baton.core.ids import TenantId
from router.errors import ApiError
from router.http.raw_body import RawBody
from router.http.response_writer import JSON_HEADERS, STREAM_HEADERS, ResponseWriter
from router.openai.best_of import prompt_usage, response_usage, select_best
from router.openai.choice_stream import ChoiceDelta, ChoiceStream
from router.openai.encoders import AnswerEncoder, ChoiceResult, ResponseMetadata
from router.openai.grammar_validator import TOOLS_FIELD, grammar_parts
from router.openai.inline_stream_writer import InlineStreamWriter
from router.openai.logprobs_budget import KeptLogprobs
from router.openai.parsers.model_output_format import tool_format_headers
from router.openai.preprocessor import (
    BYTES_PER_TOKEN_ID,
    Preprocessor,
    Prompt,
    count_prompt_logprobs,
)
from router.openai.request_handler import RequestHandler
from router.openai.schema import ChatBody, CompletionBody
from router.tenants.admission import DEFAULT_RESERVED_OUTPUT_TOKENS, num_reserved_tokens

BYTES_PER_TOKEN = 8
"""The approximate size of the JSON for the text of one token of an answer."""

BYTES_PER_TOKEN_ENTRY = 64
"""The approximate size of the JSON for one token with its logprob, or one alternative to it."""

MAX_BYTES_PER_PROMPT_TOKEN = 16
"""If a body has more bytes than this per prompt token, the excess belongs to parts of the body that
are not in the prompts, such as tools that are not offered. These bytes count against the body
budget until the answer ends: nothing else bounds how many such bodies stay in memory, where they
take a multiple of their size."""


class GenerationHandler(RequestHandler):
    """Handles requests that generate answers. A subclass says how a request of its API becomes a
    chat or completion (:meth:`_read_body`), and how the answer is encoded."""

    id_prefix: str
    ping = b": ping\n\n"
    """What a stream contains from time to time, so that it is not silent: a comment, which clients
    skip."""
    _encoder: AnswerEncoder | None = None
    _kept_logprobs: KeptLogprobs

    async def answer(self, writer: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        context = self._context
        arrived_at = context.clock.monotonic()
        request_id = f"{self.id_prefix}{context.ids.new_id()}"
        self._response_headers["x-baton-request-id"] = request_id
        if context.telemetry.tracer is not None:
            self._trace = context.telemetry.tracer.begin(request_id, self._traceparent)
        body = await self._read_body(raw, tenant)
        if isinstance(body, ChatBody) and body.offered_tools:
            self._response_headers |= tool_format_headers(self._model.text.output_format)
        if body.stream:
            writer.start_pings(self._response_headers, self.ping)
        body.priority = max(body.priority or 0, self._min_priority)
        request_context = context.request_context(self._model, tenant, body, request_id)
        preprocessor = context.preprocessor(request_context)
        prompts = await context.resources.offload_executor.tokenize(
            self._model.name,
            tenant,
            self._model.text.tokenizing_bytes(raw.size_bytes),
            lambda: self._build_prompts(preprocessor, body),
        )
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        raw.release(kept_bytes=raw.size_bytes - num_tokens * MAX_BYTES_PER_PROMPT_TOKEN)
        self._report_ignored_fields(tenant)
        field = body.format[0] if body.format is not None else TOOLS_FIELD
        grammar = prompts[0].sampling.grammar
        await self._model.text.grammar_validator.check(grammar, field, tenant, grammar_parts(body))
        self._admission.set_size(raw.size_bytes)
        await self._reserve_tokens(prompts, body)
        choices = context.create_choice_streams(
            request_id, request_context, body, prompts, arrived_at
        )
        if self._trace is not None:
            self._trace.set_records(
                [choice.record for choice in choices], context.clock.monotonic()
            )
        self._admission.set_records([choice.record for choice in choices], body.num_candidates)
        answers = [
            ChoiceResult(choice.index, prompt.token_ids, prompt.echo_text)
            for choice, prompt in zip(
                choices, _repeat_each(prompts, body.num_candidates), strict=True
            )
        ]
        self._encoder = encoder = self._create_encoder(
            self._response_metadata(request_id, body, choices), body
        )
        with context.kept_logprobs(tenant, body) as self._kept_logprobs:
            self._kept_logprobs.charge(
                count_prompt_logprobs([len(prompt.token_ids) for prompt in prompts], body)
            )
            await self._deliver(writer, choices, answers, encoder, body)

    def _detach(self) -> ExitStack:
        held = super()._detach()
        held.callback(self._kept_logprobs.detach())
        return held

    async def _reserve_tokens(
        self, prompts: Sequence[Prompt], body: ChatBody | CompletionBody
    ) -> None:
        """Reserve the request's tokens within the tenant's limits. Raises RateLimited or
        Overloaded."""
        asked = body.requested_tokens or DEFAULT_RESERVED_OUTPUT_TOKENS
        answer = min(asked, max(prompt.sampling.max_tokens for prompt in prompts))
        sizes = [len(prompt.token_ids) for prompt in prompts]
        await self._admission.draw_token_quota(
            num_reserved_tokens(sizes, body.num_candidates, answer)
        )
        self._admission.reserve_tokens(sizes, body.num_candidates, answer)
        self._admission.take_model_slots(
            partial(self._context.models.acquire, self._model),
            partial(self._context.models.release, self._model),
        )
        self._response_headers |= self._admission.headers()

    def encode_error_event(self, error: ApiError) -> bytes:
        if self._encoder is None:
            return super().encode_error_event(error)
        return self._encoder.encode_failure(error)

    @abstractmethod
    async def _read_body(self, raw: RawBody, tenant: TenantId) -> ChatBody | CompletionBody:
        """Parse the request. Raises ApiError or BatonError."""

    async def _on_complete(self, encoder: AnswerEncoder) -> None:
        """Called once the whole answer is encoded, before the end of the answer is sent to the
        client."""

    @abstractmethod
    def _build_prompts(self, preprocessor: Preprocessor, body: Any) -> list[Prompt]: ...

    @abstractmethod
    def _create_encoder(
        self, metadata: ResponseMetadata, body: ChatBody | CompletionBody
    ) -> AnswerEncoder: ...

    async def _deliver(
        self,
        writer: ResponseWriter,
        choices: Sequence[ChoiceStream],
        answers: Sequence[ChoiceResult],
        encoder: AnswerEncoder,
        body: ChatBody | CompletionBody,
    ) -> None:
        """Generate the answers, and send them to the client."""
        if body.stream:
            await self._stream(writer, choices, answers, encoder, body)
            return
        data = await self._generate(choices, answers, encoder, body)
        await self._on_complete(encoder)
        await writer.respond(200, JSON_HEADERS | self._debug_headers(choices[0]), data)

    async def _generate(
        self,
        choices: Sequence[ChoiceStream],
        answers: Sequence[ChoiceResult],
        encoder: AnswerEncoder,
        body: ChatBody | CompletionBody,
    ) -> bytes:
        """Generate the answers, and return them encoded as a whole."""
        kept_logprobs = self._kept_logprobs

        async def collect(delta: ChoiceDelta) -> None:
            if delta.token_entries:
                kept_logprobs.keep(delta.token_entries)
            answers[delta.index].add(delta)

        await self._context.run_choices(choices, collect)
        best = select_best(choices, answers, body.num_candidates, body.num_choices)
        usage = response_usage(choices, body.num_candidates)
        num_entries = sum(len(each.prompt_token_entries) + len(each.token_entries) for each in best)
        size = num_entries * _entry_size(body) + sum(len(each.prompt_text) for each in best)
        size += usage.completion_tokens * BYTES_PER_TOKEN
        if body.return_token_ids:
            size += sum(len(each.prompt_token_ids) for each in best) * BYTES_PER_TOKEN_ID
        tenant = self._admission.tenant.id
        return await self._context.resources.offload_executor.run(
            tenant, size, lambda: encoder.encode_response(best, usage)
        )

    async def _stream(
        self,
        writer: ResponseWriter,
        choices: Sequence[ChoiceStream],
        answers: Sequence[ChoiceResult],
        encoder: AnswerEncoder,
        body: ChatBody | CompletionBody,
    ) -> None:
        """Stream the answer. The response begins with the first output or the first ping, so an
        earlier failure still gets an HTTP error status."""
        unopened = {answer.index: answer for answer in answers}
        write_lock = asyncio.Lock()
        kept_logprobs = self._kept_logprobs if encoder.keeps_logprobs else None

        async def send(delta: ChoiceDelta) -> None:
            if kept_logprobs is not None:
                kept_logprobs.keep(delta.token_entries)
            async with write_lock:
                size, opening = len(answers[delta.index].prompt_token_ids), b""
                if delta.index in unopened:
                    answer = unopened.pop(delta.index)
                    answer.prompt_token_entries = delta.prompt_token_entries
                    encoder.set_token_counts(delta.index, size, 0)
                    opening = encoder.encode_opening(answer, prompt_usage(choices[delta.index]))
                encoder.set_token_counts(delta.index, size, choices[delta.index].num_tokens)
                frames = opening + encoder.encode_chunk(delta)
                if not writer.has_started:
                    headers = self._debug_headers(choices[delta.index])
                    await writer.start(200, STREAM_HEADERS | headers)
                await writer.write(frames)

        inline_writer = None
        if writer.inline_body is not None and not body.wants_running_usage:
            inline_writer = InlineStreamWriter(writer.inline_body, encoder, unopened)
        await self._context.run_choices(choices, send, inline_writer)
        usage = response_usage(choices, body.num_candidates)
        # In the Responses API, the last events repeat the whole answer.
        size = usage.completion_tokens * (_entry_size(body) + BYTES_PER_TOKEN)
        end = await self._context.resources.offload_executor.run(
            self._admission.tenant.id, size, lambda: encoder.encode_end(usage)
        )
        await self._on_complete(encoder)
        await writer.end(end)

    def _response_metadata(
        self, request_id: str, body: ChatBody | CompletionBody, choices: Sequence[ChoiceStream]
    ) -> ResponseMetadata:
        return ResponseMetadata(
            id=request_id,
            created=self._unix_seconds(),
            model=self._model.shown_name,
            return_token_ids=bool(body.return_token_ids),
            has_usage_chunk=body.wants_usage_chunk,
            has_running_usage=body.wants_running_usage,
            echoes_logprobs=isinstance(body, CompletionBody) and bool(body.echo),
            prompt_logprobs=body.prompt_logprobs is not None,
            is_obfuscated=body.wants_obfuscation,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            records=[choice.record for choice in choices],
            service_tier="default" if isinstance(body, ChatBody) and body.service_tier else None,
        )

    def _unix_seconds(self) -> int:
        return self._context.clock.wall_nanoseconds() // 1_000_000_000

    def _debug_headers(self, choice: ChoiceStream) -> dict[str, str]:
        return self._response_headers | choice.record.headers()


def _entry_size(body: ChatBody | CompletionBody) -> int:
    """Return the approximate size of the JSON for one token with logprobs; 0 without logprobs."""
    wanted = [n for n in (body.num_logprobs, body.num_prompt_logprobs) if n is not None]
    return (1 + max(wanted)) * BYTES_PER_TOKEN_ENTRY if wanted else 0


def _repeat_each(prompts: Sequence[Prompt], times: int) -> list[Prompt]:
    return [prompt for prompt in prompts for _ in range(times)]
