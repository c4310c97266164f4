"""What a worker may say of a request: a broken or compromised one says anything, and no client is
to see it, nor any other request to suffer from it."""

from collections.abc import Sequence

from baton.core.request import FinishReason, RequestOutput, RequestSpec, TokenLogprob
from baton.errors import Corrupt

MAX_DETAIL_CHARACTERS = 16_384
"""Of all details of one output: ours have some hundred."""

MAX_ERROR_CHARACTERS = 4096

UNKNOWN_VOCAB_SIZE = 1 << 32
"""Token ids as they travel."""


class InvalidOutput(Corrupt):
    """A worker said what no sound worker would. Another one may do."""


def find_output_error(output: RequestOutput, spec: RequestSpec, vocab_size: int) -> str:
    """What is wrong with an output for ``spec``; empty for one that a sound worker may send."""
    tokens, sampling = output.token_ids, spec.sampling
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        return f"token ids {_format_few(tokens)}, of a vocabulary of {vocab_size}"
    if not tokens and output.finish_reason is None:
        return "an output without a token"
    end = output.first_index + len(tokens)
    if end > sampling.max_tokens and output.finish_reason not in _ENDS_OF_PLACEMENTS:
        return f"{end} tokens, where {sampling.max_tokens} were asked for"
    if output.details and _has_oversized_details(output):
        return f"details of more than {MAX_DETAIL_CHARACTERS} characters"
    if output.logprobs and not _match_requested_logprobs(
        output.logprobs, sampling.logprobs, vocab_size
    ):
        return "other logprobs than were asked for"
    if output.logprobs and len(output.logprobs) != len(tokens):
        return f"{len(output.logprobs)} logprobs of {len(tokens)} tokens"
    scores = output.prompt_logprobs
    if scores and not (
        len(scores) == spec.num_prompt_tokens - 1
        and _match_requested_logprobs(scores, sampling.prompt_logprobs, vocab_size)
    ):
        return "other logprobs of the prompt than were asked for"
    return ""


_ENDS_OF_PLACEMENTS = (
    FinishReason.ERROR,
    FinishReason.CANCELLED,
    FinishReason.MOVED,
    FinishReason.TURNED_AWAY,
)


def _match_requested_logprobs(
    entries: Sequence[TokenLogprob], num_asked: int | None, vocab_size: int
) -> bool:
    return num_asked is not None and all(
        len(entry.top) <= num_asked
        and 0 <= entry.token_id < vocab_size
        and all(0 <= token_id < vocab_size for token_id, _ in entry.top)
        for entry in entries
    )


def _has_oversized_details(output: RequestOutput) -> bool:
    size = sum(len(name) + len(value) for name, value in output.details.items())
    return size > MAX_DETAIL_CHARACTERS


def _format_few(tokens: Sequence[int]) -> str:
    return ", ".join(map(str, tokens[:4])) + (", …" if len(tokens) > 4 else "")
