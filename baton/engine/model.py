"""One decoder for all supported architectures, which differ only in their ModelConfig."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.engine.attention.base import PackedBatch
from baton.engine.loader import LayerWeights, Weights
from baton.engine.lora.adapter import LoraWeights
from baton.engine.lora.segments import LoraSegment, add_deltas
from baton.engine.moe import moe_layer
from baton.engine.ops import LayerOps
from baton.engine.step_tokens import StepTokens

OnStart = Callable[[], None]


def no_op() -> None:
    pass


class DecoderModel(Protocol):
    """The interface through which a runner uses a model, on any backend."""

    @property
    def adapter_dtype(self) -> torch.dtype:
        """The dtype that adapters' weights must have: that of the computation."""
        ...

    def prepare_adapter(self, weights: LoraWeights) -> Any:
        """Return an adapter in the form that :meth:`hidden` takes it. This may be called in any
        thread, also while another thread computes a step."""
        ...

    def hidden(
        self,
        token_ids: torch.Tensor,
        batch: PackedBatch,
        on_start: OnStart = no_op,
        lora: Sequence[LoraSegment] = (),
    ) -> torch.Tensor:
        """Compute the last layer's hidden states [num_tokens, hidden_size] and write the KV.

        ``token_ids`` [num_tokens] are the tokens of the rows of ``batch``; those of the segments in
        ``lora`` use an adapter. This method calls ``on_start`` when all kernels are launched and it
        only has to wait for the layers.
        """
        ...

    def logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor: ...


class StepGraphs(Protocol):
    """CUDA graphs of whole decode steps, captured once and replayed."""

    def logits(self, tokens: StepTokens, batch: PackedBatch) -> torch.Tensor | None:
        """Compute the logits [num_rows, vocab] in FP32 of each row's token, and write the token's
        KV. The result is valid until the next call. Return None if there is no graph for this
        batch. ``batch`` is on the host."""
        ...

    def warm_up(self, num_rows: int) -> None:
        """Capture the graphs for batches of up to ``num_rows``."""
        ...


class Model:
    """A decoder for all supported architectures, with pre-norm, rotary embeddings and
    grouped-query attention.

    ``ops`` implements the operations of a layer and so determines the device.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: LayerOps) -> None:
        self._config = config
        self._weights = weights
        self.ops = ops

    def forward(
        self, token_ids: torch.Tensor, batch: PackedBatch, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Compute the :meth:`hidden` states, and return the :meth:`logits` of the tokens
        ``wanted``."""
        return self.logits(self.hidden(token_ids, batch), wanted)

    @property
    def adapter_dtype(self) -> torch.dtype:
        return self._weights.norm.dtype

    def prepare_adapter(self, weights: LoraWeights) -> LoraWeights:
        """Implement :meth:`DecoderModel.prepare_adapter`."""
        return weights

    def hidden(
        self,
        token_ids: torch.Tensor,
        batch: PackedBatch,
        on_start: OnStart = no_op,
        lora: Sequence[LoraSegment] = (),
    ) -> torch.Tensor:
        """Implement :meth:`DecoderModel.hidden`."""
        self.ops.prepare(batch)
        hidden = self.layers(token_ids, lora)
        on_start()  # on a GPU all kernels are launched, and on a CPU the layers are done
        return hidden

    def layers(self, token_ids: torch.Tensor, lora: Sequence[LoraSegment] = ()) -> torch.Tensor:
        """Run the layers, and return the hidden states. Unlike :meth:`hidden`, this needs
        ``self.ops`` to be prepared for the batch already."""
        x = scale_embeddings(self._weights.embedding[token_ids], self._config)
        update: torch.Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            x, normed = self._add_norm(x, update, layer.input_norm)
            attended = self._attend(index, layer, normed, lora)
            attended = self._output_norm(attended, layer.attention_output_norm)
            x, normed = self.ops.add_norm(x, attended, layer.post_norm)
            update = self._feed_forward(index, layer, normed, lora)
            update = self._output_norm(update, layer.feed_forward_output_norm)
        return x if update is None else x + update

    def logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return logits [num_wanted, vocab] in FP32 of the tokens with the indices ``wanted``."""
        if wanted.numel() == 0:
            return torch.empty((0, self._config.vocab_size), device=hidden.device)
        return self.head(hidden[wanted]).float()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_tokens, vocab] of all tokens, in the dtype of the computation."""
        return self.ops.linear(self.ops.norm(hidden, self._weights.norm), self._weights.head)

    def _add_norm(
        self, x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if update is None:
            return x, self.ops.norm(x, weight)
        return self.ops.add_norm(x, update, weight)

    def _output_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self.ops.norm(x, weight)

    def _attend(
        self, index: int, layer: LayerWeights, x: torch.Tensor, lora: Sequence[LoraSegment]
    ) -> torch.Tensor:
        qkv = self.ops.linear(x, layer.qkv, layer.qkv_bias)
        add_deltas(qkv, x, index, "qkv", lora)
        attended = self.ops.attend(index, qkv, layer)
        output = self.ops.linear(attended, layer.output, layer.output_bias)
        return add_deltas(output, attended, index, "output", lora)

    def _feed_forward(
        self, index: int, layer: LayerWeights, x: torch.Tensor, lora: Sequence[LoraSegment]
    ) -> torch.Tensor:
        moe = self._config.moe
        if moe is not None and index in moe.layers:
            return moe_layer(x, layer, moe, self.ops)
        assert layer.gate_up is not None and layer.down is not None
        gate_up = self.ops.linear(x, layer.gate_up, layer.gate_up_bias)
        gated = self.ops.activate(add_deltas(gate_up, x, index, "gate_up", lora))
        down = self.ops.linear(gated, layer.down, layer.down_bias)
        return add_deltas(down, gated, index, "down", lora)


def scale_embeddings(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Multiply by the model's embedding scale, which is rounded to the dtype of ``x`` first, as in
    transformers."""
    scale = config.traits.embedding_scale
    return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype).item()
