"""A logits processor for ``vllm serve``, so that a seeded answer can continue on another server.

vLLM's V1 model runner draws the tokens of a request with a ``seed`` from a generator that begins
anew with each request. With this processor, the seed is in ``vllm_xargs`` as ``baton_seed``, and a
token depends on it and on its position in the sequence: a server that gets the prompt and the first
tokens of the answer goes on with the tokens that the first server would have sampled. The V2 model
runner does that with ``seed`` by itself, so there the processor is accepted and does nothing.

The token is the maximum of the filtered logits, divided by the temperature, and Gumbel noise, which
is a sample of their softmax (Gumbel-max trick; Maddison et al., 2014). Requests without such a
seed, and greedy ones, are not changed.

This file needs nothing of Baton: put its folder on the server's PYTHONPATH, and start it with
``--logits-processors seed_by_position:SeedByPosition``.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor
except ImportError:  # older versions have no processors in the V2 model runner
    V2LogitsProcessor = object

SEED = "baton_seed"
MIX = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)
"""The multipliers of MurmurHash3's 32-bit finalizer, as int32."""

LARGEST_UNIFORM = 1 - 2**-24
"""The largest float32 below 1."""


@dataclass(slots=True)
class Request:
    """A seeded request. ``answer`` is vLLM's own list, which grows."""

    seed: int
    params: SamplingParams
    prompt: Sequence[int]
    answer: list[int]
    counts: Counter[int] = field(default_factory=Counter)
    """How often each token is in the first ``num_counted`` tokens of the answer."""

    num_counted: int = 0

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.answer)

    def count(self) -> Counter[int]:
        self.counts.update(self.answer[self.num_counted :])
        self.num_counted = len(self.answer)
        return self.counts


class SeedByPosition(LogitsProcessor, V2LogitsProcessor):  # type: ignore[misc]
    def __init__(self, config: VllmConfig, *_: object) -> None:
        """Each model runner passes other arguments."""
        self._requests: dict[int, Request] = {}

    def add_request(self, index: int, params: SamplingParams) -> bool:
        """Tell the V2 model runner that no request needs the processor."""
        return False

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError, which becomes status 400, unless the seed is an integer."""
        seed = (params.extra_args or {}).get(SEED, 0)
        if type(seed) is not int:
            raise ValueError(f"{SEED} is {seed!r}; it must be an integer")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, seeded_request)

    def apply(self, logits: torch.Tensor, context: object = None) -> torch.Tensor:
        """Leave only the chosen token to each seeded request.

        Args:
            logits: [num_requests, vocabulary], float32.
        """
        if not self._requests:
            return logits
        rows = torch.tensor(list(self._requests), device=logits.device)
        requests = list(self._requests.values())
        scores = logits[rows]
        for row, request in zip(scores, requests, strict=True):
            penalize(row, request)
        scores = filtered(scores, [request.params for request in requests])
        keys = [key_at(request.seed, request.position) for request in requests]
        scores += gumbel_noise(torch.tensor(keys, device=logits.device), scores.shape[-1])
        tokens = scores.argmax(-1)
        logits[rows] = -torch.inf
        logits[rows, tokens] = 0.0
        return logits


def seeded_request(
    params: SamplingParams, prompt: Sequence[int] | None, answer: list[int]
) -> Request | None:
    seed = (params.extra_args or {}).get(SEED)
    if seed is None or params.temperature == 0.0 or prompt is None:
        return None
    return Request(seed, params, prompt, answer)


def penalize(logits: torch.Tensor, request: Request) -> None:
    """Apply vLLM's penalties to ``logits``, [vocabulary], in place. vLLM itself would apply them
    afterwards."""
    params = request.params
    if params.repetition_penalty != 1.0:
        known = torch.tensor(sorted({*request.prompt, *request.answer}), device=logits.device)
        scores = logits[known]
        penalty = params.repetition_penalty
        logits[known] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = request.count()
        tokens = torch.tensor(list(counts), dtype=torch.int64, device=logits.device)
        number = torch.tensor(list(counts.values()), device=logits.device)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * number


def filtered(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return logits divided by the temperature, with -inf where ``min_p``, ``top_k`` or ``top_p``
    exclude a token; [num_requests, vocabulary]."""
    vocabulary = logits.shape[-1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    logits = logits / column([each.temperature for each in params])
    if any(each.min_p for each in params):
        least = logits.amax(-1, keepdim=True) + column([each.min_p for each in params]).log()
        logits = logits.masked_fill(logits < least, -torch.inf)
    top_k = [each.top_k if 0 < each.top_k < vocabulary else vocabulary for each in params]
    if min(top_k) < vocabulary or any(each.top_p < 1.0 for each in params):
        ranked = logits.sort(dim=-1, descending=True).values
        last = ranked.gather(1, column(top_k).long() - 1)
        shares = ranked.masked_fill(ranked < last, -torch.inf).softmax(-1)
        before = shares.cumsum(-1) - shares
        top_p = column([each.top_p if each.top_p < 1.0 else torch.inf for each in params])
        kept = (before < top_p) & (ranked >= last)
        least = ranked.gather(1, kept.sum(-1, keepdim=True).clamp(min=1) - 1)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def key_at(seed: int, position: int) -> tuple[int, int]:
    """Return two int32 for the noise of one token."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (
        int.from_bytes(digest[:4], "little", signed=True),
        int.from_bytes(digest[4:], "little", signed=True),
    )


def gumbel_noise(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return noise of the standard Gumbel distribution, [num_keys, vocabulary], float32: a function
    of the key and the token, equal on each device but for the rounding of the logarithm.

    Args:
        keys: [num_keys, 2], int32 values.
    """
    keys = keys.to(torch.int32)
    bits = torch.arange(vocabulary, dtype=torch.int32, device=keys.device) + keys[:, :1]
    bits = mixed(mixed(bits) ^ keys[:, 1:])
    uniform = ((bits.double() + (2**31 + 0.5)) * 2.0**-32).float().clamp_(max=LARGEST_UNIFORM)
    return -torch.log(-torch.log1p(-uniform))


def mixed(bits: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3's finalizer of int32 values."""
    for shift, factor in ((16, MIX[0]), (13, MIX[1])):
        bits = (bits ^ ((bits >> shift) & (2 ** (32 - shift) - 1))) * factor
    return bits ^ ((bits >> 16) & 0xFFFF)
