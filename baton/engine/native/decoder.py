"""Runs the model with Baton's CPU kernels: the counterpart of :class:`baton.engine.model.Model`,
which runs on torch."""

import weakref
from collections.abc import Sequence
from ctypes import byref

import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.checkpoints.decoder_traits import LLAMA_TRAITS, DecoderTraits
from baton.engine.attention.base import PackedBatch
from baton.engine.kv_pool import KvPool
from baton.engine.loader import CheckpointWeights, LayerOf
from baton.engine.lora.adapter import LoraWeights
from baton.engine.lora.segments import LoraSegment
from baton.engine.model import OnStart, no_op, scale_embeddings
from baton.engine.moe import add_bias, clamped_swiglu, combine_experts
from baton.engine.native.library import (
    ACTIVATION_CODES,
    DTYPE_CODES,
    LAYER_FIELDS,
    QUANTIZATION_CODES,
    DecoderShape,
    LayerPointers,
    PackedRows,
    call_checked,
)
from baton.engine.native.lora import NativeAdapter, segment_pointers
from baton.engine.native.matrix import KernelThreadPool, PackedMatrix
from baton.engine.quantization import head_quantization
from baton.engine.rope import RotaryTable, RotaryTables
from baton.engine.shards import StoredTensor


class NativeModel:
    """Implements :class:`baton.engine.model.DecoderModel`. One call into the kernels computes all
    layers of a step, except in models with mixtures of experts, whose routing is done by torch.

    The weights are read from the mapped checkpoint and packed. Only an embedding that is not tied
    to the head is kept as a torch tensor instead.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: CheckpointWeights,
        pool: KvPool,
        thread_pool: KernelThreadPool,
        quantization: str = "none",
    ) -> None:
        self._config, self.thread_pool = config, thread_pool
        self._dtype = dtype = pool.tensor.dtype
        self._core = NativeDecoder(shape_of(config, pool), pool, thread_pool, quantization)
        rotary = RotaryTables(config, pool.tensor.device, dtype)
        halves = [_halves(table) for table in rotary.tables]
        self._core.set_head(weights.norm, weights.head)
        experts: dict[int, _NativeExperts] = {}
        for index in weights.layer_order:
            layer = weights.layers[index]
            self._core.set_layer(
                index, layer, halves[rotary.table_index(index)], config.traits.window(index)
            )
            if layer.router is not None:
                experts[index] = _NativeExperts(thread_pool, layer, config, dtype, quantization)
        self._experts = {index: experts[index] for index in sorted(experts)}
        self._embedding = None
        if weights.head is not weights.embedding:
            self._embedding = weights.embedding.join(pool.tensor.device, dtype)

    @property
    def adapter_dtype(self) -> torch.dtype:
        return self._dtype

    def prepare_adapter(self, weights: LoraWeights) -> NativeAdapter:
        """Implement :meth:`baton.engine.model.DecoderModel.prepare_adapter`."""
        return NativeAdapter(self.thread_pool, weights, self._dtype)

    def hidden(
        self,
        token_ids: torch.Tensor,
        batch: PackedBatch,
        on_start: OnStart = no_op,
        lora: Sequence[LoraSegment] = (),
    ) -> torch.Tensor:
        """Implement :meth:`baton.engine.model.DecoderModel.hidden`."""
        assert token_ids.shape == (batch.offsets[-1],), token_ids.shape
        x = self._embed(token_ids)
        first = 0
        for index, experts in self._experts.items():
            normed = torch.empty_like(x)
            self._core.run(batch, first, index + 1, x, normed, on_start, lora)
            x += experts(normed)
            first, on_start = index + 1, no_op
        self._core.run(batch, first, self._config.num_layers, x, x, on_start, lora)
        return x

    @property
    def weight_bytes(self) -> int:
        """Size of all matrices as they are stored, in bytes."""
        experts = sum(each.size_bytes for each in self._experts.values())
        embedding = 0 if self._embedding is None else self._embedding.nbytes
        return self._core.weight_bytes + experts + embedding

    def logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return logits [num_wanted, vocab] in FP32 of the tokens with the indices ``wanted``,
        which must be in increasing order."""
        return self._core.logits(hidden if len(wanted) == len(hidden) else hidden[wanted])

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._embedding is not None:
            return scale_embeddings(self._embedding[token_ids], self._config)
        return scale_embeddings(self._core.embed(token_ids), self._config)


class NativeAttention:
    """Computes attention with the CPU kernels, without the rest of the model. Implements
    :class:`baton.engine.attention.base.Attention`."""

    def __init__(
        self,
        pool: KvPool,
        traits: DecoderTraits = LLAMA_TRAITS,
        thread_pool: KernelThreadPool | None = None,
    ) -> None:
        self._pool, self._traits = pool, traits
        self._thread_pool = thread_pool or KernelThreadPool(torch.get_num_threads())
        self._core: NativeDecoder | None = None

    def prepare(self, batch: PackedBatch) -> None:
        self._batch = batch

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._core is None:
            shape = _attention_shape(self._pool, q.shape[1], self._traits)
            self._core = NativeDecoder(shape, self._pool, self._thread_pool)
        self._core.set_attention(layer, self._traits.window(layer), sinks)
        return self._core.attend(self._batch, layer, q, k, v)


class NativeDecoder:
    """Wraps the C++ decoder, and keeps alive the memory to which the decoder points.

    This class checks shapes and dtypes, which do not change; the kernels check lengths, block
    tables and tokens in each step.
    """

    def __init__(
        self,
        shape: DecoderShape,
        pool: KvPool,
        thread_pool: KernelThreadPool,
        quantization: str = "none",
    ) -> None:
        memory = pool.tensor
        sizes = (shape.num_blocks, shape.layers_per_block, 2, shape.block_tokens, shape.kv_heads)
        assert memory.shape == (*sizes, shape.head_dim) and memory.is_contiguous(), memory.shape
        assert shape.heads % shape.kv_heads == 0 and shape.head_dim % 2 == 0
        self._shape, self._thread_pool, self._dtype = shape, thread_pool, memory.dtype
        self._places = pool.groups.places
        self._quantization = quantization
        self._kept_alive: list[object] = [memory]
        self._library = library = thread_pool.library
        self._handle = library.baton_decoder(
            thread_pool.handle, DTYPE_CODES[memory.dtype], byref(shape), memory.data_ptr()
        )
        assert self._handle, "out of memory"
        end = weakref.finalize(self, library.baton_decoder_free, self._handle)
        end.atexit = False

    def set_layer(
        self,
        index: int,
        weights: LayerOf[StoredTensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        window: int | None = None,
    ) -> None:
        """Pack and set the weights of a layer, except those of its experts, which the C++ decoder
        does not compute. ``rotary`` has the layer's cosines and sines [positions, head_dim / 2] in
        FP32."""
        for table in rotary:
            assert table.shape == (self._shape.positions, self._shape.head_dim // 2), table.shape
            assert table.dtype is torch.float32 and table.is_contiguous()
        self._kept_alive.append(rotary)
        cos, sin = (table.data_ptr() for table in rotary)
        group, place = self._places[index]
        layer = LayerPointers(
            coding=QUANTIZATION_CODES[self._quantization],
            cos=cos,
            sin=sin,
            window=window or 0,
            group=group,
            place=place,
        )
        for name in LAYER_FIELDS:
            stack: StoredTensor | None = getattr(weights, name)
            if stack is not None:
                setattr(layer, name, self._store(name, stack))
        self._library.baton_set_layer(self._handle, index, byref(layer))

    def set_attention(self, index: int, window: int | None, sinks: torch.Tensor | None) -> None:
        """Set what :meth:`attend` uses of a layer. ``sinks`` must be kept alive while it is
        called."""
        group, place = self._places[index]
        layer = LayerPointers(window=window or 0, group=group, place=place)
        if sinks is not None:
            self._check(sinks, self._shape.heads)
            layer.sinks = sinks.data_ptr()
        self._library.baton_set_layer(self._handle, index, byref(layer))

    def _store(self, name: str, stack: StoredTensor) -> int:
        """Convert a tensor to the kernels' format, keep it alive, and return its address."""
        if len(stack.shape) == 1:
            assert self._sizes[name] == stack.shape, name
            return self._store_vector(stack)
        packed = self._pack(stack, self._quantization, gated=name == "gate_up")
        assert self._sizes[name] == (packed.outs, packed.ins), name
        return packed.address

    def _pack(self, stack: StoredTensor, quantization: str, *, gated: bool = False) -> PackedMatrix:
        packed = PackedMatrix(
            self._thread_pool, stack, gated=gated, dtype=self._dtype, quantization=quantization
        )
        self._kept_alive.append(packed)
        return packed

    def _store_vector(self, stack: StoredTensor) -> int:
        """Keep a copy of a vector and return the address of the copy. A view instead of a copy
        would keep the whole file mapped."""
        vector = stack.join(torch.device("cpu"), self._dtype).clone()
        self._kept_alive.append(vector)
        return vector.data_ptr()

    def set_head(self, norm: StoredTensor, head: StoredTensor) -> None:
        shape = self._shape
        assert norm.shape == (shape.hidden,) and head.shape == (shape.vocabulary, shape.hidden)
        quantization = head_quantization(self._quantization)
        packed = self._pack(head, quantization)
        self._library.baton_set_head(
            self._handle, self._store_vector(norm), packed.address, QUANTIZATION_CODES[quantization]
        )

    @property
    def weight_bytes(self) -> int:
        return sum(each.size_bytes for each in self._kept_alive if isinstance(each, PackedMatrix))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings [num_tokens, hidden]. The embedding must be tied to the
        head, whose weights are used."""
        assert token_ids.dtype is torch.int64
        token_ids = token_ids.contiguous()
        x = torch.empty(len(token_ids), self._shape.hidden, dtype=self._dtype)
        call_checked(
            self._library.baton_embed,
            self._handle, token_ids.data_ptr(), len(token_ids), x.data_ptr(),
        )  # fmt: skip
        return x

    def run(
        self,
        batch: PackedBatch,
        first: int,
        last: int,
        x: torch.Tensor,
        normed: torch.Tensor,
        on_start: OnStart = no_op,
        lora: Sequence[LoraSegment] = (),
    ) -> None:
        """Compute layers [first, last) on ``x`` [num_tokens, hidden], in place. If the last of
        these layers has experts, stop before them and write their input to ``normed``. The adapters
        of ``lora`` are instances of :class:`NativeAdapter`."""
        for tensor in (x, normed):
            self._check(tensor, batch.offsets[-1], self._shape.hidden)
        rows, keep_alive = _rows(batch)
        segments = segment_pointers(lora) if lora else None
        arguments = byref(rows), segments, len(lora), first, last, x.data_ptr(), normed.data_ptr()
        on_start()
        call_checked(self._library.baton_run, self._handle, *arguments)
        del keep_alive

    def attend(
        self, batch: PackedBatch, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Implement :meth:`baton.engine.attention.base.Attention.attend`."""
        qkv = torch.cat((q, k, v), dim=1)
        heads = self._shape.heads + 2 * self._shape.kv_heads
        self._check(qkv, batch.offsets[-1], heads, self._shape.head_dim)
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        rows, keep_alive = _rows(batch)
        call_checked(
            self._library.baton_attend,
            self._handle, byref(rows), layer, qkv.data_ptr(), output.data_ptr(),
        )  # fmt: skip
        del keep_alive
        return output

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_rows, vocabulary] in FP32 of ``x`` [num_rows, hidden]."""
        logits = torch.empty(x.shape[0], self._shape.vocabulary)
        if x.shape[0]:
            x = x.contiguous()
            self._check(x, x.shape[0], self._shape.hidden)
            call_checked(
                self._library.baton_logits,
                self._handle, x.data_ptr(), x.shape[0], logits.data_ptr(),
            )  # fmt: skip
        return logits

    def _check(self, tensor: torch.Tensor, *shape: int) -> None:
        assert tensor.shape == shape and tensor.is_contiguous(), f"{tensor.shape}, not {shape}"
        assert tensor.dtype is self._dtype and tensor.device.type == "cpu", tensor.dtype

    @property
    def _sizes(self) -> dict[str, tuple[int, ...]]:
        shape = self._shape
        hidden, attended = shape.hidden, shape.heads * shape.head_dim
        joined = attended + 2 * shape.kv_heads * shape.head_dim
        return {
            "input_norm": (hidden,),
            "post_norm": (hidden,),
            "qkv": (joined, hidden),
            "qkv_bias": (joined,),
            "output": (hidden, attended),
            "q_norm": (shape.head_dim,),
            "k_norm": (shape.head_dim,),
            "gate_up": (shape.intermediate, hidden),
            "down": (hidden, shape.intermediate),
            "output_bias": (hidden,),
            "gate_up_bias": (2 * shape.intermediate,),
            "down_bias": (hidden,),
            "sinks": (shape.heads,),
            "attention_output_norm": (hidden,),
            "feed_forward_output_norm": (hidden,),
        }


class _NativeExperts:
    """The mixture of experts of one layer, with routing by torch and products by the kernels."""

    def __init__(
        self,
        team: KernelThreadPool,
        layer: LayerOf[StoredTensor],
        config: ModelConfig,
        dtype: torch.dtype,
        quantization: str,
    ) -> None:
        assert config.moe is not None
        self._moe = config.moe
        # The kernels compute SiLU(gate) * up together with the product.
        is_fused = config.moe.clamped is None

        def pack(stack: StoredTensor, *, gated: bool = False) -> PackedMatrix:
            return PackedMatrix(team, stack, gated=gated, dtype=dtype, quantization=quantization)

        gate_up, down = layer.expert_gate_up, layer.expert_down
        assert layer.router is not None and gate_up is not None and down is not None
        self._router = PackedMatrix(team, layer.router, dtype=dtype)
        self._gate_up = [pack(each, gated=is_fused) for each in gate_up.split()]
        self._down = [pack(each) for each in down.split()]

        self._router_bias, *self._biases = (
            None if stack is None else stack.join(torch.device("cpu"), dtype)
            for stack in (layer.router_bias, layer.expert_gate_up_bias, layer.expert_down_bias)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = self._router(x)
        if self._router_bias is not None:
            scores += self._router_bias
        return combine_experts(x, scores, self._expert, self._moe)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in (self._router, *self._gate_up, *self._down))

    def _expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        gated = add_bias(self._gate_up[index](x), self._biases[0], index)
        if self._moe.clamped is not None:
            gated = clamped_swiglu(gated, self._moe.clamped)
        return add_bias(self._down[index](gated), self._biases[1], index)


def shape_of(config: ModelConfig, pool: KvPool) -> DecoderShape:
    return DecoderShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        num_blocks=pool.num_blocks,
        block_tokens=pool.block_tokens,
        layers_per_block=pool.groups.layers_per_block,
        num_groups=pool.groups.num_groups,
        epsilon=config.rms_norm_eps,
        score_scale=config.traits.score_scale(config.head_dim),
        norm_offset=config.traits.norm_offset,
        norms_round_last=config.traits.norms_round_last,
        activation=ACTIVATION_CODES[config.traits.activation],
    )


def _attention_shape(
    pool: KvPool, heads: int, traits: DecoderTraits = LLAMA_TRAITS
) -> DecoderShape:
    """Return the shape of a decoder that only computes attention."""
    num_blocks, layers_per_block, _, block_tokens, kv_heads, head_dim = pool.tensor.shape
    return DecoderShape(
        layers=len(pool.groups.places),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        positions=num_blocks * block_tokens,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        layers_per_block=layers_per_block,
        num_groups=pool.groups.num_groups,
        score_scale=traits.score_scale(head_dim),
    )


def _halves(table: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines in FP32, for one half of a head; the other half has the same."""
    half = table.cos.shape[1] // 2
    return (
        table.cos[:, :half].float().contiguous(),
        table.sin[:, :half].float().contiguous(),
    )


def _rows(batch: PackedBatch) -> tuple[PackedRows, list[torch.Tensor]]:
    """Return the batch for the kernels, and the tensors to which its addresses point. The caller
    must keep these alive."""
    tables = batch.block_tables
    assert tables.dtype is torch.int64 and tables.is_contiguous()
    num_groups, num_rows, stride = tables.shape
    assert num_rows == batch.num_rows == len(batch.offsets) - 1
    starts, offsets = (torch.tensor(part) for part in (batch.starts, batch.offsets))
    rows = PackedRows(
        num_rows=num_rows,
        starts=starts.data_ptr(),
        offsets=offsets.data_ptr(),
        tables=tables.data_ptr(),
        table_stride=stride,
        num_groups=num_groups,
    )
    kept = [tables, starts, offsets]
    if batch.attention_windows:
        windows = torch.tensor(batch.attention_windows)
        rows.windows = windows.data_ptr()
        kept.append(windows)
    return rows, kept
