"""Samples tokens with the CPU kernels: the counterpart of :mod:`baton.engine.sampler`, which uses
torch."""

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.native.library import SAMPLING_ROW_DTYPE, call_checked
from baton.engine.native.matrix import KernelThreadPool
from baton.engine.plan import Row
from baton.engine.sampler import is_plain_greedy

NUM_SEEDS = 2**64
"""Seeds are taken modulo this number: only their lowest 64 bits are used."""


class NativeTokenChooser:
    """Implements :class:`baton.engine.sampler.TokenChooser`. Rows are divided among the threads of
    ``thread_pool``, and no vocabulary is sorted. It chooses the same tokens as the torch
    implementation, except when a random draw is within FP64's rounding error of the boundary
    between two tokens."""

    def __init__(self, thread_pool: KernelThreadPool, vocab_size: int) -> None:
        self._library, self._vocab_size = thread_pool.library, vocab_size
        self._thread_pool = thread_pool  # kept alive as long as its threads are used
        self._handle = thread_pool.library.baton_samplers(thread_pool.handle, vocab_size)
        assert self._handle, "out of memory"
        end = weakref.finalize(self, thread_pool.library.baton_samplers_free, self._handle)
        end.atexit = False

    def __call__(self, scores: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        assert scores.shape == (len(rows), self._vocab_size), scores.shape
        assert scores.dtype is torch.float32 and scores.device.type == "cpu", scores.dtype
        scores = scores.contiguous()
        chosen = np.empty(len(rows), dtype=np.int64)
        is_greedy = all(is_plain_greedy(row.sampling) for row in rows)
        arrays = None if is_greedy else _sampling_arrays(rows)
        addresses = [array.ctypes.data for array in arrays] if arrays else [None] * 4
        call_checked(
            self._library.baton_sample,
            self._handle, scores.data_ptr(), len(rows),
            *addresses, chosen.ctypes.data,
        )  # fmt: skip
        tokens: list[int] = chosen.tolist()
        return tokens


def _sampling_arrays(rows: Sequence[Row]) -> tuple[np.ndarray, ...]:
    """Return the rows' sampling parameters, and the concatenated histories, biased tokens and
    biases of all rows."""
    history: list[np.ndarray] = []
    biases: list[tuple[int, float]] = []
    parameters, history_end = [], 0
    for row in rows:
        params = row.sampling
        history_start, bias_start = history_end, len(biases)
        answer_start = history_start
        if params.needs_history:
            history.append(np.array(row.history, dtype=np.int64))
            answer_start = history_start + row.num_prompt_tokens
            history_end = history_start + len(row.history)
        biases += params.logit_bias
        parameters.append(
            (
                params.temperature, params.top_p, params.min_p, params.repetition_penalty,
                params.presence_penalty, params.frequency_penalty, params.seed % NUM_SEEDS,
                row.context_tokens, params.top_k, history_start, answer_start,
                history_end, bias_start, len(biases),
            )
        )  # fmt: skip
    return (
        np.array(parameters, dtype=SAMPLING_ROW_DTYPE),
        np.concatenate(history) if history else np.empty(0, dtype=np.int64),
        np.array([token for token, _ in biases], dtype=np.int64),
        np.array([bias for _, bias in biases], dtype=np.float64),
    )
