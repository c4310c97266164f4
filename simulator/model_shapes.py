"""The shapes of models, from their published config.json, and the parameter counts that follow from
them."""

from dataclasses import dataclass

from baton.errors import Invalid
from simulator.attention_shape import AttentionShape, GroupedQueryAttention, LatentAttention

KV_BYTES = 2
"""Bytes per number in the KV cache: BF16, independently of the weights."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a layer. Every token uses the ``shared`` experts, and ``per_token`` of the
    ``routed`` experts. ``intermediate_size`` is the width of one expert. The first ``dense_layers``
    layers have no experts."""

    routed: int
    per_token: int
    intermediate_size: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``intermediate_size`` is the width of the gated feed-forward part of a layer without experts
    (0 if all layers have experts). Parameter counts cover matrices only; norms and biases are less
    than a thousandth of the total."""

    name: str
    layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    attention: AttentionShape
    experts: ExpertShape | None = None
    bytes_per_weight: float = 2.0

    @property
    def kv_bytes_per_token(self) -> int:
        return KV_BYTES * self.layers * self.attention.kv_elements_per_token

    @property
    def embedding_parameters(self) -> int:
        """The number of parameters in the input embedding table. It is counted separately, since a
        token reads only one row of the table. The output embedding, which every token uses
        completely, is part of ``common_parameters``."""
        return self.vocab_size * self.hidden_size

    @property
    def common_parameters(self) -> int:
        """The number of parameters in the matrices that every token uses."""
        return self.common_parameters_per_gpu(1)

    def common_parameters_per_gpu(self, tensor_size: int) -> int:
        """Return how many of the parameters that every token uses each of ``tensor_size`` GPUs has.
        Each has its share of each matrix, but the experts' routers completely."""
        attention = self.layers * self.attention.parameters(self.hidden_size, tensor_size)
        feed_forward = 3 * self.hidden_size * self._common_intermediate_size // tensor_size
        output = self.embedding_parameters_per_gpu(tensor_size)
        return attention + feed_forward + self._routers + output

    def embedding_parameters_per_gpu(self, tensor_size: int) -> int:
        """Return how many parameters of the input embedding table, and so of the output embedding,
        each of ``tensor_size`` GPUs has. The vocabulary is split, and rounded up."""
        return -(-self.vocab_size // tensor_size) * self.hidden_size

    @property
    def expert_layers(self) -> int:
        """The number of layers that have routed experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """The number of parameters in the routed experts of all layers."""
        if self.experts is None:
            return 0
        return (
            self.expert_layers
            * self.experts.routed
            * 3
            * self.hidden_size
            * self.experts.intermediate_size
        )

    @property
    def parameters(self) -> int:
        return self.embedding_parameters + self.common_parameters + self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """The number of parameters in the matrices that one token uses."""
        if self.experts is None:
            return self.common_parameters
        chosen = self.expert_parameters * self.experts.per_token // self.experts.routed
        return self.common_parameters + chosen

    @property
    def weight_bytes(self) -> int:
        return round(self.parameters * self.bytes_per_weight)

    @property
    def _common_intermediate_size(self) -> int:
        """The sum, over all layers, of the widths of the feed-forward parts that every token
        uses."""
        if self.experts is None:
            return self.layers * self.intermediate_size
        shared = self.expert_layers * self.experts.shared * self.experts.intermediate_size
        return self.experts.dense_layers * self.intermediate_size + shared

    @property
    def _routers(self) -> int:
        return self.expert_layers * self.hidden_size * self.experts.routed if self.experts else 0


# Source: config.json of each repository on the Hugging Face hub (meta-llama/Llama-3.1-8B and -70B,
# Qwen/Qwen3-8B, -32B and -30B-A3B, deepseek-ai/DeepSeek-V3). DeepSeek-V3 is published in FP8, the
# others in BF16; its multi-token prediction layer is left out.
_SHAPES = (
    ModelShape("llama-3.1-8b", 32, 4096, 14_336, 128_256, GroupedQueryAttention(32, 8, 128)),
    ModelShape("llama-3.1-70b", 80, 8192, 28_672, 128_256, GroupedQueryAttention(64, 8, 128)),
    ModelShape("qwen3-8b", 36, 4096, 12_288, 151_936, GroupedQueryAttention(32, 8, 128)),
    ModelShape("qwen3-32b", 64, 5120, 25_600, 151_936, GroupedQueryAttention(64, 8, 128)),
    ModelShape(
        "qwen3-30b-a3b",
        layers=48,
        hidden_size=2048,
        intermediate_size=0,
        vocab_size=151_936,
        attention=GroupedQueryAttention(32, 4, 128),
        experts=ExpertShape(routed=128, per_token=8, intermediate_size=768),
    ),
    ModelShape(
        "deepseek-v3",
        layers=61,
        hidden_size=7168,
        intermediate_size=18_432,
        vocab_size=129_280,
        attention=LatentAttention(
            query_heads=128,
            query_lora_rank=1536,
            kv_lora_rank=512,
            rope_head_dim=64,
            nope_head_dim=128,
            value_head_dim=128,
        ),
        experts=ExpertShape(
            routed=256, per_token=8, intermediate_size=2048, shared=1, dense_layers=3
        ),
        bytes_per_weight=1.0,
    ),
)

SHAPES = {shape.name: shape for shape in _SHAPES}


def get_model_shape(name: str) -> ModelShape:
    """Return the shape of the model with this name; case is ignored. Raises Invalid if the name is
    unknown."""
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise Invalid(f"unknown model {name!r}; known models: {', '.join(SHAPES)}", param="model")
    return shape
