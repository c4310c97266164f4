"""Decode steps as CUDA graphs: one launch per step instead of hundreds."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.engine.attention.base import PackedBatch
from baton.engine.cuda.attention import SPLIT_TOKENS
from baton.engine.cuda.ops import TritonOps
from baton.engine.cuda.static_batch import StaticBatch
from baton.engine.kv_pool import KvPool
from baton.engine.model import Model
from baton.engine.step_tokens import StepTokens

BUCKETS = (1, 2, 4, *range(8, 257, 8))
"""The batch sizes. Padding costs little: weights are read once for all rows, and a padding row,
which has no context, reads nothing from the pool."""

MAX_SPLITS_BYTES = 512 * 1024 * 1024
"""Maximum size of the buffer in which a graph keeps the split results of one layer. The buffer is
large enough for the longest contexts that the graph supports."""


def bucket_for(num_rows: int) -> int | None:
    """Return the smallest bucket for ``num_rows`` rows; None if there is none."""
    assert num_rows > 0
    index = bisect_left(BUCKETS, num_rows)
    return BUCKETS[index] if index < len(BUCKETS) else None


def context_limit(num_rows: int, max_tokens: int, split_tokens: int, split_bytes: int) -> int:
    """Return the maximum context of each row of a bucket: the model's ``max_tokens``, or fewer
    tokens if their split results would exceed ``MAX_SPLITS_BYTES``. ``split_bytes`` is the size of
    one split's result for one row and all heads."""
    splits = MAX_SPLITS_BYTES // (num_rows * split_bytes)
    return min(max_tokens, splits * split_tokens)


WARM_UPS = 2
"""Number of runs before a capture. The first run compiles kernels and allocates persistent memory,
which is not possible during a capture."""


class Graph(Protocol):
    def replay(self) -> None:
        """Run the captured work again, on the same memory."""
        ...


CaptureGraph = Callable[[Callable[[], None]], Graph]
"""Runs and captures a function's work on the device, and returns its graph."""


class DecodeCudaGraphs:
    """The CUDA graphs of a model that runs on TritonOps, one per bucket. A graph is captured when
    it is first needed, or by :meth:`warm_up`.

    All graphs write their logits to the same tensor and share their scratch memory, so only one may
    run at a time.
    """

    def __init__(
        self, model: Model, config: ModelConfig, pool: KvPool, capture: CaptureGraph
    ) -> None:
        assert isinstance(model.ops, TritonOps)
        self._model = model
        self._ops = model.ops
        self._config = config
        self._block_tokens = pool.block_tokens
        self._num_groups = pool.groups.num_groups
        self._device = pool.tensor.device
        self._capture = capture
        self._captured: dict[int, tuple[StaticBatch, Graph]] = {}
        self._logits = torch.empty((BUCKETS[-1], config.vocab_size), device=self._device)

    def logits(self, tokens: StepTokens, batch: PackedBatch) -> torch.Tensor | None:
        """Implement :meth:`baton.engine.model.StepGraphs.logits`. Return None if the batch is not
        decode-only, is too large, or has contexts that are too long or attention windows. The
        device must have finished the work of the call before the previous one."""
        rows = bucket_for(batch.num_rows)
        if rows is None or batch.num_decodes < batch.num_rows or batch.attention_windows:
            return None
        if max(batch.context_lengths) > self._context_limit(rows):
            return None
        static, graph = self._get_or_capture(rows)
        static.fill(tokens, batch)
        graph.replay()
        return self._logits[: batch.num_rows]

    @torch.inference_mode()
    def warm_up(self, num_rows: int) -> None:
        """Capture the graphs of all buckets that batches of up to ``num_rows`` rows need. The
        largest graph is captured first, so that the smaller ones fit into its scratch memory."""
        last = bucket_for(num_rows) or BUCKETS[-1]
        for rows in reversed(BUCKETS):
            if rows <= last:
                self._get_or_capture(rows)

    def _get_or_capture(self, rows: int) -> tuple[StaticBatch, Graph]:
        if rows not in self._captured:
            limit = self._context_limit(rows)
            static = StaticBatch(rows, limit, self._block_tokens, self._device, self._num_groups)
            self._captured[rows] = static, self._capture(lambda: self._step(static))
        return self._captured[rows]

    def _step(self, static: StaticBatch) -> None:
        self._ops.set_batch(static.device_batch)
        hidden = self._model.layers(static.token_ids)
        self._logits[: static.rows].copy_(self._model.head(hidden))

    def _context_limit(self, rows: int) -> int:
        split_bytes = self._ops.attention.split_bytes(self._config.num_heads)
        return context_limit(rows, self._config.max_position_embeddings, SPLIT_TOKENS, split_bytes)


class CudaCapture:
    """Implements ``CaptureGraph``. All its graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch's handle of the memory pool

    def __call__(self, work: Callable[[], None]) -> Graph:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture, for the store or a KV transfer.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._pool = graph.pool()
        return graph
