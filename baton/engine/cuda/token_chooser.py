"""Chooses the tokens of a batch on the GPU. It neither waits for the device nor copies to the
host."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.cuda import filter_kernels
from baton.engine.cuda import sampling_kernels as kernels
from baton.engine.cuda.launch import KernelLauncher, ceil_div, power_of_2
from baton.engine.philox_batch import uniforms
from baton.engine.plan import Row

_find_maxima, _sum_weights, _pick_tokens = map(
    KernelLauncher, (kernels.find_maxima, kernels.sum_weights, kernels.pick_tokens)
)
_gather_candidates, _apply_filters = map(
    KernelLauncher, (filter_kernels.gather_candidates, filter_kernels.apply_filters)
)

CHUNK_TOKENS = 4096
"""Number of tokens per chunk, 16 per thread. It determines the order of sums, so it does not depend
on the batch."""

CANDIDATES_AT_ONCE = 2048
"""Number of candidates that ``apply_filters`` reads at once, 8 per thread."""

LAUNCH_OPTIONS = {"num_warps": 8, "maxnreg": 128}
"""128 registers per thread let two programs of eight warps run at once on a multiprocessor."""

_PARAMETERS = attrgetter(
    "sampling.temperature", "sampling.min_p", "sampling.top_k", "sampling.top_p"
)
"""The row's parameters in the order of the table's columns."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """The parameters of rows that share one tensor of scores. ``entries`` [num_rows, NUM_COLUMNS]
    are in FP64, with the columns of :mod:`baton.engine.cuda.sampling_kernels`. First come
    ``num_filtered`` rows with top-k or top-p, then others that are sampled at random, and then the
    greedy ones, which begin at ``num_random``."""

    entries: NDArray[np.float64]
    num_filtered: int
    num_random: int

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Row],
        score_rows: Sequence[int],
        token_rows: Sequence[int],
        vocab_size: int,
    ) -> "RowTable":
        """Describe ``rows``. ``score_rows`` are their indices in the scores, and ``token_rows``
        those in the chosen tokens."""
        entries = np.zeros((len(rows), kernels.NUM_COLUMNS))
        entries[:, kernels.SCORE_ROW], entries[:, kernels.TOKEN_ROW] = score_rows, token_rows
        entries[:, kernels.TEMPERATURE : kernels.DRAW] = list(map(_PARAMETERS, rows))
        entries[:, kernels.DRAW] = uniforms(
            [row.sampling.seed for row in rows], [row.context_tokens for row in rows]
        )
        top_k = entries[:, kernels.TOP_K]
        top_k[(top_k == 0) | (top_k > vocab_size)] = vocab_size
        is_random = entries[:, kernels.TEMPERATURE] != 0
        is_filtered = is_random & ((top_k < vocab_size) | (entries[:, kernels.TOP_P] < 1))
        order = np.argsort(~is_filtered * 1 + ~is_random, kind="stable")
        return cls(entries[order], int(is_filtered.sum()), int(is_random.sum()))


def upload_tables(tables: Sequence[RowTable], device: torch.device) -> Sequence[torch.Tensor]:
    """Return the entries of each table on ``device``, after one asynchronous copy."""
    sizes = [len(table.entries) for table in tables]
    shape = (sum(sizes), kernels.NUM_COLUMNS)
    on_host = torch.empty(shape, dtype=torch.float64, pin_memory=device.type == "cuda")
    np.concatenate([table.entries for table in tables], out=on_host.numpy())
    return torch.split(on_host.to(device, non_blocking=True), sizes)


def choose_tokens(
    scores: torch.Tensor,
    table: RowTable,
    entries: torch.Tensor,
    tokens: torch.Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
) -> None:
    """Write one token per row of ``table`` to ``tokens`` (int32). ``scores`` [num_rows, vocab] are
    in FP32 or FP64, and ``entries`` are those of the table on the device; this overwrites them."""
    assert scores.stride(1) == 1 and tokens.dtype is torch.int32
    num_rows, vocab_size = len(table.entries), scores.shape[1]
    num_chunks = ceil_div(vocab_size, chunk_tokens)
    shape = (num_rows, num_chunks, kernels.RECORD_SIZE)
    records = torch.empty(shape, dtype=torch.float64, device=scores.device)
    inputs = (scores, scores.stride(0), entries, records)
    sizes = {"VOCAB": vocab_size, "CHUNK": chunk_tokens, **LAUNCH_OPTIONS}
    _find_maxima[(num_rows, num_chunks)](*inputs, **sizes)
    sizes["PADDED"] = power_of_2(num_chunks)
    if table.num_random:
        _sum_weights[(table.num_random, num_chunks)](*inputs, **sizes)
    if table.num_filtered:
        candidates = records.new_empty((table.num_filtered, vocab_size))
        _gather_candidates[(table.num_filtered, num_chunks)](*inputs, candidates, **sizes)
        _apply_filters[(table.num_filtered,)](
            entries,
            records,
            candidates,
            **sizes,
            BLOCK=CANDIDATES_AT_ONCE,
        )
    _pick_tokens[(num_rows,)](*inputs, tokens, **sizes)
