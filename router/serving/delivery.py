"""Generates the answers of a request, and sends them to its client: as a whole, or as a stream.

There is a fast path for streamed tokens, from the worker's message into the client's socket without
waking a task. Each stream has a task that waits for its worker. Waking that task takes several
times as long as writing the token. So an output that only adds text is encoded and written as soon
as it arrives, as long as the client keeps up (:class:`InlineStreamWriter`)."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.core.ids import TenantId
from baton.core.request import NUMERIC, RequestOutput
from router.http.response_writer import STREAM_HEADERS, InlineBodyWriter, ResponseWriter
from router.serving.answer_encoder import AnswerEncoder, Usage
from router.serving.choice_result import ChoiceResult
from router.serving.choice_stream import ChoiceDelta, ChoiceStream
from router.serving.choices import run_choices
from router.serving.context import RouterContext
from router.serving.event_cursor import EventCursor
from router.serving.memory_budgets import KeptLogprobs
from router.serving.preprocessor import BYTES_PER_TOKEN_ID
from router.serving.request import GenerationRequest

CONTINUATION_HEADER = "x-baton-continuation"

BYTES_PER_TOKEN = 8
"""The approximate size of the JSON for the text of one token of an answer."""

BYTES_PER_TOKEN_ENTRY = 64
"""The approximate size of the JSON for one token with its logprob, or one alternative to it."""


@dataclass(slots=True)
class AnswerDelivery:
    """The answers of one request while they are generated. ``headers`` are the response's. With a
    ``cursor``, the events of a stream have ids, and those that the client has are not sent."""

    context: RouterContext
    tenant: TenantId
    request: GenerationRequest
    choices: Sequence[ChoiceStream]
    answers: Sequence[ChoiceResult]
    encoder: AnswerEncoder
    kept_logprobs: KeptLogprobs
    headers: Mapping[str, str]
    cursor: EventCursor | None = None

    async def generate(self) -> bytes:
        """Generate the answers, and return them encoded as a whole."""
        request, choices, encoder = self.request, self.choices, self.encoder

        async def collect(delta: ChoiceDelta) -> None:
            if delta.token_entries:
                self.kept_logprobs.keep(delta.token_entries)
            self.answers[delta.index].add(delta)

        await run_choices(self.context, choices, request.num_candidates, collect)
        best = select_best(choices, self.answers, request.num_candidates, request.num_choices)
        usage = response_usage(choices, request.num_candidates)
        num_entries = sum(len(each.prompt_token_entries) + len(each.token_entries) for each in best)
        size = num_entries * _entry_size(request) + sum(len(each.prompt_text) for each in best)
        size += usage.completion_tokens * BYTES_PER_TOKEN
        if request.return_token_ids:
            size += sum(len(each.prompt_token_ids) for each in best) * BYTES_PER_TOKEN_ID
        return await self.context.resources.offload_executor.run(
            self.tenant, size, lambda: encoder.encode_response(best, usage)
        )

    async def stream(self, writer: ResponseWriter) -> bytes:
        """Stream the answers, and return the encoded end of the stream. The response begins with
        the first output or the first ping, so an earlier failure still gets an HTTP error
        status."""
        request, choices, answers, encoder = self.request, self.choices, self.answers, self.encoder
        unopened = {answer.index: answer for answer in answers}
        write_lock, cursor = asyncio.Lock(), self.cursor
        kept_logprobs = self.kept_logprobs if encoder.keeps_logprobs else None

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
                if cursor is not None:
                    cursor.add_tokens(delta.index, delta.token_ids)
                    frames = cursor.number(delta.index, frames)
                    if not frames:
                        return
                if not writer.has_started:
                    headers = self.debug_headers(choices[delta.index])
                    await writer.start(200, STREAM_HEADERS | headers)
                await writer.write(frames)

        inline_writer = None
        if writer.inline_body is not None and not request.reports_running_usage:
            inline_writer = InlineStreamWriter(writer.inline_body, encoder, unopened, cursor)
        await run_choices(self.context, choices, request.num_candidates, send, inline_writer)
        usage = response_usage(choices, request.num_candidates)
        # In the Responses API, the last events repeat the whole answer.
        size = usage.completion_tokens * (_entry_size(request) + BYTES_PER_TOKEN)
        end = await self.context.resources.offload_executor.run(
            self.tenant, size, lambda: encoder.encode_end(usage)
        )
        if cursor is not None:
            end = cursor.number(0, end)
            cursor.end()
            if not writer.has_started:
                await writer.start(200, STREAM_HEADERS | self.debug_headers(choices[0]))
        # The stream's headers were sent before it was known; clients skip comments.
        comments = (encoder.encode_comment(f"{k}: {v}") for k, v in self._continuation().items())
        return b"".join(comments) + end

    def debug_headers(self, choice: ChoiceStream) -> dict[str, str]:
        """Return the response's headers with those that describe how an answer was generated."""
        return {**self.headers, **choice.record.headers(), **self._continuation()}

    def _continuation(self) -> dict[str, str]:
        """Return the header that says how the answers continued on other workers; none if none of
        them did."""
        found = {choice.record.continuation for choice in self.choices} - {""}
        return {CONTINUATION_HEADER: NUMERIC if NUMERIC in found else found.pop()} if found else {}


class InlineStreamWriter:
    """Writes the outputs of a request's answers directly, as text chunks. ``unopened`` are the
    answers whose first chunk has not been sent yet, by index. The same dict and the same ``cursor``
    are used and changed by the code that writes all other chunks."""

    def __init__(
        self,
        body: InlineBodyWriter,
        encoder: AnswerEncoder,
        unopened: dict[int, ChoiceResult],
        cursor: EventCursor | None = None,
    ) -> None:
        self._cursor = cursor
        self._body = body
        self._encoder = encoder
        self._unopened = unopened

    def write_output(self, choice: ChoiceStream, output: RequestOutput) -> bool:
        """Write the text of an output and return True. If the client does not keep up, or has the
        text already, do nothing and return False."""
        cursor = self._cursor
        if not self._body.is_open or (cursor is not None and cursor.is_skipping(choice.index)):
            return False
        text, events = choice.take_text(output), b""
        if text:
            opening = self._encode_opening(choice) if choice.index in self._unopened else b""
            events = opening + self._encoder.encode_text(choice.index, text)
        if cursor is not None:
            cursor.add_tokens(choice.index, output.token_ids)
            events = cursor.number(choice.index, events)
        if events:
            self._body.write(events)
        return True

    def _encode_opening(self, choice: ChoiceStream) -> bytes:
        usage = prompt_usage(choice)
        return self._encoder.encode_opening(self._unopened.pop(choice.index), usage)


def _entry_size(request: GenerationRequest) -> int:
    """Return the approximate size of the JSON for one token with logprobs; 0 without logprobs."""
    wanted = [n for n in (request.num_logprobs, request.num_prompt_logprobs) if n is not None]
    return (1 + max(wanted)) * BYTES_PER_TOKEN_ENTRY if wanted else 0


def response_usage(choices: Sequence[ChoiceStream], per_prompt: int) -> Usage:
    """Return the usage of a whole request that has ``per_prompt`` answers for each prompt. A
    prompt's tokens count once. Its cached tokens are those that were cached for all of its
    answers."""
    records = [choice.record for choice in choices]
    groups = [records[start : start + per_prompt] for start in range(0, len(records), per_prompt)]
    return Usage(
        prompt_tokens=sum(group[0].num_prompt_tokens for group in groups),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        cached_tokens=sum(min(record.cached_tokens or 0 for record in group) for group in groups),
        reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices),
    )


def prompt_usage(choice: ChoiceStream) -> Usage:
    """Return the usage of an answer's prompt alone."""
    record = choice.record
    return Usage(record.num_prompt_tokens, 0, record.cached_tokens or 0)


def select_best(
    choices: Sequence[ChoiceStream], answers: Sequence[ChoiceResult], candidates: int, wanted: int
) -> Sequence[ChoiceResult]:
    """Return the ``wanted`` best of each prompt's ``candidates`` answers: those whose tokens have
    the highest mean logprob."""
    if candidates == wanted:
        return answers
    best: list[ChoiceResult] = []
    for start in range(0, len(answers), candidates):
        ranked = sorted(
            range(start, start + candidates), key=lambda index: -choices[index].mean_logprob
        )
        best += [answers[index] for index in ranked[:wanted]]
    return [replace(answer, index=index) for index, answer in enumerate(best)]
