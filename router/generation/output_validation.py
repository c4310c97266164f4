"""Validates outputs from workers. A broken or compromised worker may send anything; invalid outputs
must not reach clients or harm other requests."""

from collections.abc import Sequence

from baton.core.request import FinishReason, RequestOutput, RequestSpec, TokenLogprob
from baton.errors import Corrupt
from router.limits import MAX_DETAIL_CHARACTERS

UNKNOWN_VOCAB_SIZE = 1 << 32
"""Used if the vocabulary size is not known: every token id that fits the wire format is below
it."""


class InvalidOutput(Corrupt):
    """A worker sent an output that only a faulty worker would send. Another worker may succeed."""


def find_output_error(output: RequestOutput, spec: RequestSpec, vocab_size: int) -> str:
    """Return what is wrong with an output for the request ``spec``, phrased to follow "the worker
    sent"; empty if the output is valid."""
    tokens, sampling = output.token_ids, spec.sampling
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        return f"token ids {_format_few(tokens)} outside the vocabulary of {vocab_size}"
    if not tokens and output.finish_reason is None:
        return "an output without a token"
    end = output.first_index + len(tokens)
    if end > sampling.max_tokens and output.finish_reason not in _EARLY_FINISH_REASONS:
        return f"{end} tokens, but at most {sampling.max_tokens} were requested"
    if output.details and _has_oversized_details(output):
        return f"details of more than {MAX_DETAIL_CHARACTERS} characters"
    if output.logprobs and not _match_requested_logprobs(
        output.logprobs, sampling.logprobs, vocab_size
    ):
        return "logprobs that differ from those requested"
    if output.logprobs and len(output.logprobs) != len(tokens):
        return f"{len(output.logprobs)} logprobs for {len(tokens)} tokens"
    scores = output.prompt_logprobs
    if scores and not (
        len(scores) == spec.num_prompt_tokens - 1
        and _match_requested_logprobs(scores, sampling.prompt_logprobs, vocab_size)
    ):
        return "prompt logprobs that differ from those requested"
    return ""


_EARLY_FINISH_REASONS = (
    FinishReason.ERROR,
    FinishReason.CANCELLED,
    FinishReason.MIGRATED,
    FinishReason.REROUTED,
)


def _match_requested_logprobs(
    entries: Sequence[TokenLogprob], num_requested: int | None, vocab_size: int
) -> bool:
    return num_requested is not None and all(
        len(entry.top) <= num_requested
        and 0 <= entry.token_id < vocab_size
        and all(0 <= token_id < vocab_size for token_id, _ in entry.top)
        for entry in entries
    )


def _has_oversized_details(output: RequestOutput) -> bool:
    size = sum(len(name) + len(value) for name, value in output.details.items())
    return size > MAX_DETAIL_CHARACTERS


def _format_few(tokens: Sequence[int]) -> str:
    return ", ".join(map(str, tokens[:4])) + (", …" if len(tokens) > 4 else "")
