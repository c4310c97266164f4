"""One decoder for every supported architecture; what differs is in its ModelConfig."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from baton.checkpoint import ModelConfig
from baton.engine.attention.base import PackedBatch
from baton.engine.loader import LayerWeights, Weights
from baton.engine.moe import moe_layer
from baton.engine.ops import LayerOps

OnStart = Callable[[], None]


def no_op() -> None:
    pass


class DecoderModel(Protocol):
    """What a runner asks of a model, on whatever it computes."""

    def hidden(
        self, token_ids: torch.Tensor, batch: PackedBatch, on_start: OnStart = no_op
    ) -> torch.Tensor:
        """What the last layer says of each token, [num_tokens, hidden_size].

        ``token_ids`` [num_tokens] are the packed rows of ``batch``, whose KV is written. Calls
        ``on_start`` when nothing is left for the interpreter to do until the layers are computed.
        """
        ...

    def logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor: ...


class StepGraphs(Protocol):
    """Steps that were captured once, and are launched as a whole."""

    def logits(self, token_ids: Sequence[int], batch: PackedBatch) -> torch.Tensor | None:
        """Logits [num_rows, vocab] in FP32 of each row's token, until the next call; its KV is
        written. None when this batch was not captured. ``batch`` lies on the host."""
        ...

    def warm(self, num_rows: int) -> None:
        """Captures what batches of up to ``num_rows`` need."""
        ...


class Model:
    """Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE; pre-norm, rotary, grouped-query attention.

    ``ops`` computes what a layer is made of, and so decides which device this runs on.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: LayerOps) -> None:
        self._config = config
        self._weights = weights
        self.ops = ops

    def forward(
        self, token_ids: torch.Tensor, batch: PackedBatch, wanted: torch.Tensor
    ) -> torch.Tensor:
        """:meth:`logits` of :meth:`hidden`."""
        return self.logits(self.hidden(token_ids, batch), wanted)

    def hidden(
        self, token_ids: torch.Tensor, batch: PackedBatch, on_start: OnStart = no_op
    ) -> torch.Tensor:
        """As :meth:`DecoderModel.hidden`."""
        self.ops.prepare(batch)
        hidden = self.layers(token_ids)
        on_start()  # on a GPU all of it is launched, and on a CPU it is done
        return hidden

    def layers(self, token_ids: torch.Tensor) -> torch.Tensor:
        """:meth:`hidden` of the batch that the ops were prepared for."""
        x = self._weights.embedding[token_ids]
        update: torch.Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            x, normed = self._add_norm(x, update, layer.input_norm)
            x, normed = self.ops.add_norm(x, self._attend(index, layer, normed), layer.post_norm)
            update = self._feed_forward(index, layer, normed)
        return x if update is None else x + update

    def logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [num_wanted, vocab] in FP32 of the tokens with indices ``wanted``."""
        if wanted.numel() == 0:
            return torch.empty((0, self._config.vocab_size), device=hidden.device)
        return self.head(hidden[wanted]).float()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [num_tokens, vocab] of all tokens, in the run's dtype."""
        return self.ops.linear(self.ops.norm(hidden, self._weights.norm), self._weights.head)

    def _add_norm(
        self, x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if update is None:
            return x, self.ops.norm(x, weight)
        return self.ops.add_norm(x, update, weight)

    def _attend(self, index: int, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        qkv = self.ops.linear(x, layer.qkv, layer.qkv_bias)
        return self.ops.linear(self.ops.attend(index, qkv, layer), layer.output)

    def _feed_forward(self, index: int, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        moe = self._config.moe
        if moe is not None and index in moe.layers:
            return moe_layer(x, layer, moe, self.ops)
        assert layer.gate_up is not None and layer.down is not None
        gate_up = self.ops.linear(x, layer.gate_up)
        return self.ops.linear(self.ops.gated(gate_up), layer.down)
