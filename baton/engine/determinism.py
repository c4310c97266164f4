"""The promise that a request's logits have the same bits in whatever company, and wherever.

Our kernels keep it (docs/engine.md). That is tried here once more, on this machine and with this
model; and the bits that came out tell workers which compute alike from others.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import pack_batch
from baton.engine.kv_pool import KvPool
from baton.engine.model import DecoderModel
from baton.engine.native.backend_choice import BackendChoice
from baton.engine.plan import Row
from baton.errors import Invalid

PROBE_TOKENS = 20
"""Beyond a block of 16, and beyond a tile of six rows; more would only take longer."""

STRIDE = 7919
"""Between two tokens of the probe: a prime, so that they are anywhere in the vocabulary."""

CHUNKS = (7, 1, PROBE_TOKENS)
"""Of the probe's second reading."""

GPU_PROBE_TOKENS, GPU_CHUNKS = 300, (7, 1, 130, 300)
"""There tiles are larger, and time is short: beyond 64 rows of a product, and 128 of attention."""

UNVERIFIED_NOTE = (
    "deterministic as Triton's interpreter is: not yet seen on any GPU but by its trial here"
)
"""What is to be said of the promise where nobody has tried it at length (docs/cuda.md)."""

NUM_PROBE_COPIES = 3
"""Of the probe, each with blocks of its own: alone, in company, and the company."""

_UNUSED = SamplingParams(max_tokens=1)


def require_deterministic(choice: BackendChoice, device: torch.device) -> BackendChoice:
    """``choice``, with what is to be said of its promise. Raises Invalid, with what would help,
    where a model computes neither on our kernels nor on a GPU."""
    if device.type != "cpu":
        return replace(choice, told=f"{choice.told}; {UNVERIFIED_NOTE}", is_fallback=True)
    if not choice.native:
        raise Invalid(
            f"deterministic is on, and would be computed by {choice.told}; its sums depend on what "
            "else is in a batch. It needs our own kernels: a CPU with AVX2 and a C++ compiler, "
            "device=cpu, dtype float32 or bfloat16, and cpu_kernels=auto (`baton doctor` says what "
            "this machine lacks)",
            param="deterministic",
        )
    return choice


def numerics_fingerprint(model: DecoderModel, pool: KvPool, vocab_size: int) -> str:
    """Hex, equal on two workers iff the probe's logits have the same bits there: weights, format,
    kernels and processor alike. Writes to the pool, so it comes before anything else does.

    Raises Invalid when they have other bits in chunks and beside another request.
    """
    if pool.num_blocks < NUM_PROBE_COPIES:
        raise Invalid(
            f"deterministic needs a pool of {NUM_PROBE_COPIES} blocks at least, "
            f"not {pool.num_blocks}: "
            "raise pool_bytes or num_blocks",
            param="num_blocks",
        )
    tokens = [n * STRIDE % vocab_size for n in range(_length(pool))]
    alone = _read(model, pool, tokens, (len(tokens),), beside=False)
    chunks = CHUNKS if pool.tensor.device.type == "cpu" else GPU_CHUNKS
    if not torch.equal(alone, _read(model, pool, tokens, chunks, beside=True)):
        raise Invalid(
            "deterministic is on, and this machine's logits depend on how a step is put together: "
            "that is a bug of the kernels on this processor or GPU; please report it with "
            "`baton doctor`'s output",
            param="deterministic",
        )
    return hashlib.blake2b(alone.cpu().numpy().tobytes(), digest_size=8).hexdigest()


def deterministic_digest(model_digest: bytes, arithmetic: str) -> bytes:
    """Names a model and its arithmetic: who has another one shares no KV."""
    told = model_digest + bytes.fromhex(arithmetic)
    return hashlib.blake2b(told, digest_size=16, person=b"baton.exact.v1").digest()


def _length(pool: KvPool) -> int:
    """Of the probe, which is shorter where the pool is tiny."""
    wanted = PROBE_TOKENS if pool.tensor.device.type == "cpu" else GPU_PROBE_TOKENS
    return min(wanted, pool.num_blocks // NUM_PROBE_COPIES * pool.block_tokens)


def _read(
    model: DecoderModel, pool: KvPool, tokens: Sequence[int], chunks: Sequence[int], *, beside: bool
) -> torch.Tensor:
    """Logits of all ``tokens``, read in chunks of these sizes; ``beside``: from other blocks, and
    with another request in each step."""
    told: list[torch.Tensor] = []
    start = 0
    for size in chunks:
        part = tokens[start : start + size]
        if not part:
            break
        rows = [_row(pool, part, start, 1 if beside else 0)]
        if beside:
            rows.append(_row(pool, tokens[::-1], 0, 2))
        told.append(_logits(model, pool, rows)[: len(part)])
        start += len(part)
    return torch.cat(told)


def _row(pool: KvPool, tokens: Sequence[int], start: int, place: int) -> Row:
    """In the ``place``-th part of the pool, of as many blocks as a probe takes at most."""
    count = -(-_length(pool) // pool.block_tokens)
    blocks = range(place * count, (place + 1) * count)
    return Row(
        RequestId("probe"),
        tuple(TokenId(token) for token in tokens),
        start,
        tuple(BlockId(block) for block in blocks),
        sample=False,
        sampling=_UNUSED,
    )


@torch.inference_mode()
def _logits(model: DecoderModel, pool: KvPool, rows: Sequence[Row]) -> torch.Tensor:
    device = pool.tensor.device
    batch = pack_batch(rows, pool.block_tokens, torch.device("cpu"))
    tokens = [token for row in rows for token in row.token_ids]
    hidden = model.hidden(torch.tensor(tokens, device=device), batch)
    return model.logits(hidden, torch.arange(rows[0].num_tokens, device=device))
