"""Choosing tokens on the kernels: what :mod:`baton.engine.sampler` does by torch, row by row."""

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.native.library import SAMPLING_ROW_DTYPE, call_checked
from baton.engine.native.matrix import KernelThreadPool
from baton.engine.plan import Row
from baton.engine.sampler import is_plain_greedy

SEEDS = 2**64
"""A seed counts by its last 64 bits."""


class NativeTokenChooser:
    """Implements :class:`baton.engine.sampler.TokenChooser`: rows are shared out among ``team``,
    and no vocabulary is sorted. The same tokens as torch's, but where a draw lies as near to a
    token's border as FP64 rounds."""

    def __init__(self, team: KernelThreadPool, vocab_size: int) -> None:
        self._library, self._vocab_size = team.library, vocab_size
        self._team = team  # lives as long as whoever uses its threads
        self._handle = team.library.baton_samplers(team.handle, vocab_size)
        assert self._handle, "out of memory"
        end = weakref.finalize(self, team.library.baton_samplers_free, self._handle)
        end.atexit = False

    def __call__(self, scores: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        assert scores.shape == (len(rows), self._vocab_size), scores.shape
        assert scores.dtype is torch.float32 and scores.device.type == "cpu", scores.dtype
        scores = scores.contiguous()
        chosen = np.empty(len(rows), dtype=np.int64)
        asked = None if all(is_plain_greedy(row.sampling) for row in rows) else _asked(rows)
        addresses = [part.ctypes.data for part in asked] if asked else [None] * 4
        call_checked(
            self._library.baton_choose,
            self._handle, scores.data_ptr(), len(rows),
            *addresses, chosen.ctypes.data,
        )  # fmt: skip
        tokens: list[int] = chosen.tolist()
        return tokens


def _asked(rows: Sequence[Row]) -> tuple[np.ndarray, ...]:
    """The rows' dials, and all histories, biased tokens and biases, one behind the other."""
    history: list[np.ndarray] = []
    biases: list[tuple[int, float]] = []
    dials, end = [], 0
    for row in rows:
        params = row.sampling
        seen, bias = end, len(biases)
        answer = seen
        if params.needs_history:
            history.append(np.array(row.history, dtype=np.int64))
            answer, end = seen + row.num_prompt_tokens, seen + len(row.history)
        biases += params.logit_bias
        dials.append(
            (
                params.temperature, params.top_p, params.min_p, params.repetition_penalty,
                params.presence_penalty, params.frequency_penalty, params.seed % SEEDS,
                row.context_tokens, params.top_k, seen, answer, end, bias, len(biases),
            )
        )  # fmt: skip
    return (
        np.array(dials, dtype=SAMPLING_ROW_DTYPE),
        np.concatenate(history) if history else np.empty(0, dtype=np.int64),
        np.array([token for token, _ in biases], dtype=np.int64),
        np.array([bias for _, bias in biases], dtype=np.float64),
    )
