"""Models by the numbers of their published config.json, and what follows from them."""

from dataclasses import dataclass

from baton.errors import Invalid
from simulator.attention_shape import AttentionShape, GroupedQueryAttention, LatentAttention

KV_BYTES = 2
"""Of a number in the KV cache: BF16, whatever the weights are."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """``shared`` ones are every token's; of ``routed`` ones each token takes ``per_token``.
    ``inner`` is the width of one; the first ``dense_layers`` layers have none of them."""

    routed: int
    per_token: int
    inner: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``inner`` is the width of a layer's gated feed-forward part where it has no experts (0 when
    all have). Counts are of matrices; norms and biases are less than a thousandth."""

    name: str
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    attention: AttentionShape
    experts: ExpertShape | None = None
    bytes_per_weight: float = 2.0

    @property
    def kv_bytes_per_token(self) -> int:
        return KV_BYTES * self.layers * self.attention.kv_numbers

    @property
    def embedding_parameters(self) -> int:
        """The table of the input, of which a token reads a row. The output's counts as a matrix."""
        return self.vocabulary * self.hidden

    @property
    def common_parameters(self) -> int:
        """Of the matrices that every token is multiplied with."""
        attention = self.layers * self.attention.parameters(self.hidden)
        output = self.vocabulary * self.hidden
        return attention + 3 * self.hidden * self._common_inner + self._routers + output

    @property
    def expert_parameters(self) -> int:
        """Of all routed experts of all layers."""
        if self.experts is None:
            return 0
        return self._expert_layers * self.experts.routed * 3 * self.hidden * self.experts.inner

    @property
    def parameters(self) -> int:
        return self.embedding_parameters + self.common_parameters + self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Of the matrices that one token is multiplied with."""
        if self.experts is None:
            return self.common_parameters
        chosen = self.expert_parameters * self.experts.per_token // self.experts.routed
        return self.common_parameters + chosen

    @property
    def weight_bytes(self) -> int:
        return round(self.parameters * self.bytes_per_weight)

    @property
    def _expert_layers(self) -> int:
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def _common_inner(self) -> int:
        """The widths, in all layers, of the feed-forward parts that every token takes."""
        if self.experts is None:
            return self.layers * self.inner
        shared = self._expert_layers * self.experts.shared * self.experts.inner
        return self.experts.dense_layers * self.inner + shared

    @property
    def _routers(self) -> int:
        return self._expert_layers * self.hidden * self.experts.routed if self.experts else 0


# Source: config.json of each repository on the Hugging Face hub (meta-llama/Llama-3.1-8B and -70B,
# Qwen/Qwen3-8B, -32B and -30B-A3B, deepseek-ai/DeepSeek-V3). DeepSeek-V3 is published in FP8, the
# others in BF16; its layer for predicting two tokens at once is left out.
_SHAPES = (
    ModelShape("llama-3.1-8b", 32, 4096, 14_336, 128_256, GroupedQueryAttention(32, 8, 128)),
    ModelShape("llama-3.1-70b", 80, 8192, 28_672, 128_256, GroupedQueryAttention(64, 8, 128)),
    ModelShape("qwen3-8b", 36, 4096, 12_288, 151_936, GroupedQueryAttention(32, 8, 128)),
    ModelShape("qwen3-32b", 64, 5120, 25_600, 151_936, GroupedQueryAttention(64, 8, 128)),
    ModelShape(
        "qwen3-30b-a3b",
        layers=48,
        hidden=2048,
        inner=0,
        vocabulary=151_936,
        attention=GroupedQueryAttention(32, 4, 128),
        experts=ExpertShape(routed=128, per_token=8, inner=768),
    ),
    ModelShape(
        "deepseek-v3",
        layers=61,
        hidden=7168,
        inner=18_432,
        vocabulary=129_280,
        attention=LatentAttention(
            query_heads=128,
            query_rank=1536,
            kv_rank=512,
            rotated_dim=64,
            plain_dim=128,
            value_dim=128,
        ),
        experts=ExpertShape(routed=256, per_token=8, inner=2048, shared=1, dense_layers=3),
        bytes_per_weight=1.0,
    ),
)

SHAPES = {shape.name: shape for shape in _SHAPES}


def get_model_shape(name: str) -> ModelShape:
    """In capitals or not. Raises Invalid for a name that is none."""
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise Invalid(f"there is no model {name!r}; there are {', '.join(SHAPES)}", param="model")
    return shape
