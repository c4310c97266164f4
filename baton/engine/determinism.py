"""Verifies the guarantee that a request's logits have the same bits in any batch and on any worker.

Our kernels are written to be batch-invariant (docs/engine.md). This module checks whether that
holds on this machine with this model, by computing a probe prompt in different batches and chunks.
A hash of the probe's logits shows which workers compute the same bits.
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
"""Length of the probe prompt: longer than a block of 16 tokens and a tile of six rows. A longer
prompt would take more time and verify nothing else."""

PROBE_STRIDE = 7919
"""Distance between successive token ids of the probe: a prime, so that they spread over the
vocabulary."""

PROBE_CHUNKS = (7, 1, PROBE_TOKENS)
"""Chunk sizes of the probe's second run."""

GPU_PROBE_TOKENS, GPU_PROBE_CHUNKS = 300, (7, 1, 130, 300)
"""The probe's length and chunk sizes on a GPU, where tiles are larger: the probe must have more
than the 64 rows of a product's tile and the 128 rows of an attention tile."""

VERIFIED_CAPABILITY = (9, 0)
"""The compute capability of the GPUs (H100) on which determinism was tested at length
(docs/cuda.md)."""

UNVERIFIED_NOTE = (
    "determinism was tested on an H100, but on this kind of GPU only by a check at startup"
)
"""Added to the backend's description on GPUs of another compute capability."""

NUM_PROBE_COPIES = 3
"""Number of requests that the check computes, each in its own blocks: the probe alone, the probe in
a batch, and the other request of that batch."""

_UNUSED = SamplingParams(max_tokens=1)


def require_deterministic(choice: BackendChoice, device: torch.device) -> BackendChoice:
    """Check that a model can be deterministic on the backend ``choice``, and return the backend. On
    a kind of GPU where determinism is unverified, a note is added to its description. Raises
    Invalid with a remedy if the model runs neither on our CPU kernels nor on a GPU."""
    if device.type != "cpu":
        if torch.cuda.get_device_capability(device) == VERIFIED_CAPABILITY:
            return choice
        return replace(
            choice, description=f"{choice.description}; {UNVERIFIED_NOTE}", is_fallback=True
        )
    if not choice.is_native:
        raise Invalid(
            f"deterministic is on, but the model would be computed by {choice.description}, whose "
            "sums depend on the rest of a batch. deterministic needs Baton's CPU kernels: a CPU "
            "with AVX2 and a C++ compiler, device=cpu, dtype float32 or bfloat16, and "
            "cpu_kernels=auto (`baton doctor` says what this machine lacks)",
            param="deterministic",
        )
    return choice


def numerics_fingerprint(model: DecoderModel, pool: KvPool, vocab_size: int) -> str:
    """Return a hash (hex) of the probe's logits. It is equal on two workers iff both compute the
    same bits, which requires the same weights, formats, kernels and kind of processor. This writes
    to the pool, so it must be called before the pool is used.

    The probe is computed twice: alone in one step, then in chunks, each in a batch with another
    request. Raises Invalid if the two results differ, or if the pool is too small for the probe.
    """
    if pool.num_blocks < NUM_PROBE_COPIES:
        raise Invalid(
            f"deterministic needs a pool of at least {NUM_PROBE_COPIES} blocks, "
            f"not {pool.num_blocks}: "
            "raise pool_bytes or num_blocks",
            param="num_blocks",
        )
    tokens = [n * PROBE_STRIDE % vocab_size for n in range(_probe_length(pool))]
    alone = _probe(model, pool, tokens, (len(tokens),), in_batch=False)
    chunks = PROBE_CHUNKS if pool.tensor.device.type == "cpu" else GPU_PROBE_CHUNKS
    if not torch.equal(alone, _probe(model, pool, tokens, chunks, in_batch=True)):
        raise Invalid(
            "deterministic is on, but this machine's logits depend on the batch and the chunks: "
            "that is a bug of the kernels on this processor or GPU; please report it with "
            "`baton doctor`'s output",
            param="deterministic",
        )
    return hashlib.blake2b(alone.cpu().numpy().tobytes(), digest_size=8).hexdigest()


def deterministic_digest(model_digest: bytes, fingerprint: str) -> bytes:
    """Return a digest of a model and its numerics fingerprint. Workers with different digests
    don't share KV."""
    data = model_digest + bytes.fromhex(fingerprint)
    return hashlib.blake2b(data, digest_size=16, person=b"baton.exact.v1").digest()


def _probe_length(pool: KvPool) -> int:
    """Return the length of the probe prompt in tokens. The probe is shorter if the pool is too
    small for its usual length."""
    wanted = PROBE_TOKENS if pool.tensor.device.type == "cpu" else GPU_PROBE_TOKENS
    num_spans = pool.num_blocks // NUM_PROBE_COPIES // pool.groups.num_groups
    return min(wanted, num_spans * pool.block_tokens)


def _probe(
    model: DecoderModel,
    pool: KvPool,
    tokens: Sequence[int],
    chunks: Sequence[int],
    *,
    in_batch: bool,
) -> torch.Tensor:
    """Compute the logits of all ``tokens`` (the probe) in chunks of the sizes ``chunks``. If
    ``in_batch`` is set, each step also computes another request, and the probe's KV is written to
    other blocks than when ``in_batch`` is not set."""
    logits: list[torch.Tensor] = []
    start = 0
    for size in chunks:
        part = tokens[start : start + size]
        if not part:
            break
        rows = [_row(pool, part, start, 1 if in_batch else 0)]
        if in_batch:
            rows.append(_row(pool, tokens[::-1], 0, 2))
        logits.append(_logits(model, pool, rows)[: len(part)])
        start += len(part)
    return torch.cat(logits)


def _row(pool: KvPool, tokens: Sequence[int], start: int, copy: int) -> Row:
    """Return a row of one of the ``NUM_PROBE_COPIES`` requests. ``copy`` is the request's index,
    which determines its blocks."""
    count = -(-_probe_length(pool) // pool.block_tokens) * pool.groups.num_groups
    blocks = range(copy * count, (copy + 1) * count)
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
    num_groups = pool.groups.num_groups
    batch = pack_batch(rows, pool.block_tokens, torch.device("cpu"), num_groups=num_groups)
    tokens = [token for row in rows for token in row.token_ids]
    hidden = model.hidden(torch.tensor(tokens, device=device), batch)
    return model.logits(hidden, torch.arange(rows[0].num_tokens, device=device))
