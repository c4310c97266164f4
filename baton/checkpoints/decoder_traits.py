"""Parses what distinguishes the supported architectures' decoders from Llama's."""

from dataclasses import dataclass
from typing import Any

from baton.checkpoints.json_file import JsonFile
from baton.checkpoints.rope_config import RopeConfig, local_rope
from baton.errors import Invalid

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
FULL, SLIDING = "full_attention", "sliding_attention"

DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "gemma3": {
        "attention_bias": False,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rope_theta": 150_000.0,
        "sliding_window": 128,
    },
}
"""The values that transformers uses for keys that an architecture's config.json does not have."""


@dataclass(frozen=True, slots=True)
class DecoderTraits:
    """What distinguishes a decoder from Llama's.

    ``windows`` has each layer's sliding window: the number of last tokens, its own included, that a
    token attends to, or None if it attends to all. If ``windows`` is empty, no layer has a window.
    Layers with a window have the rotary embedding ``local_rope`` if that is set. Attention scores
    are multiplied by ``attention_scale`` (None: 1 / sqrt(head_dim)). With ``has_sinks``, each query
    head has a learned score that takes part in the softmax and belongs to no token.

    ``norm_offset`` is added to the weights of norms. If ``norms_round_last``, a norm is rounded
    after the multiplication by its weight, not before. With ``has_output_norms``, the outputs of
    attention and feed-forward are normed before they are added to the residual. Embeddings are
    multiplied by ``embedding_scale``.
    """

    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    attention_scale: float | None = None
    has_sinks: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    norm_offset: float = 0.0
    norms_round_last: bool = False
    has_output_norms: bool = False
    embedding_scale: float = 1.0

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def score_scale(self, head_dim: int) -> float:
        """Return the factor of attention scores."""
        return head_dim**-0.5 if self.attention_scale is None else self.attention_scale


LLAMA_TRAITS = DecoderTraits()


@dataclass(frozen=True, slots=True)
class ClampedSwiGlu:
    """The activation of gpt-oss' experts: (up + 1) * gate * sigmoid(``alpha`` * gate). Gates are
    clamped to ``limit``, and ups to +-``limit``. Gate and up alternate in the product's columns."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Configuration of a mixture of experts. ``layers`` are the indexes of the layers that have
    experts. ``clamped`` is set for gpt-oss: its router and experts have biases, and the softmax is
    computed over the scores of the chosen experts only."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalizes_weights: bool
    layers: frozenset[int]
    clamped: ClampedSwiGlu | None = None


def load_traits(raw: JsonFile, architecture: str, num_layers: int) -> DecoderTraits:
    """Parse the traits of an architecture. Raises Invalid for a model that needs features which the
    engine lacks, since the engine would silently generate wrong tokens."""
    is_gemma, is_gpt = architecture == "gemma3", architecture == "gpt_oss"
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if is_gemma and raw.get(key):
            raise Invalid(f"{raw.path}: {key} is {raw.get(key)!r}, which is not supported")
    return DecoderTraits(
        windows=_windows(raw, architecture, num_layers),
        local_rope=local_rope(raw) if is_gemma else None,
        attention_scale=raw.positive_float("query_pre_attn_scalar") ** -0.5 if is_gemma else None,
        has_sinks=is_gpt,
        output_bias=has_attention_bias(raw, architecture) and architecture != "qwen2",
        mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias")),
        activation=_activation(raw, "hidden_activation" if is_gemma else "hidden_act"),
        norm_offset=1.0 if is_gemma else 0.0,
        norms_round_last=is_gemma or is_gpt,
        has_output_norms=is_gemma,
        embedding_scale=raw.positive_int("hidden_size") ** 0.5 if is_gemma else 1.0,
    )


def has_attention_bias(raw: JsonFile, architecture: str) -> bool:
    """Whether the projections of queries, keys and values have biases. If so, the output's
    projection has one, too, except in Qwen2."""
    if architecture in ("qwen2", "mistral"):
        return architecture == "qwen2"
    return bool(raw.get("attention_bias", False))


def _activation(raw: JsonFile, key: str) -> str:
    name = raw.get(key, "silu")
    if name not in ACTIVATIONS:
        raise Invalid(
            f"{raw.path}: {key} is {name!r}; supported activations: {', '.join(ACTIVATIONS)}"
        )
    return str(name)


def _windows(raw: JsonFile, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window. A window that is as long as the longest context is none."""
    if architecture == "llama" or raw.get("sliding_window") is None:
        return ()
    if architecture.startswith("qwen") and not raw.get("use_sliding_window", False):
        return ()
    window = raw.positive_int("sliding_window")
    if window >= raw.positive_int("max_position_embeddings"):
        return ()
    usual = _usual_layer_types(raw, architecture, num_layers)
    types = raw.get("layer_types", usual)
    if not isinstance(types, list) or len(types) != num_layers or set(types) - {FULL, SLIDING}:
        raise Invalid(
            f"{raw.path}: layer_types is {types!r}; it must have {num_layers} items, each "
            f"{FULL!r} or {SLIDING!r}"
        )
    if types != usual and architecture in ("mistral", "qwen3_moe"):
        raise Invalid(f"{raw.path}: layer_types is not supported; all layers have the same window")
    windows = tuple(window if each == SLIDING else None for each in types)
    return windows if any(windows) else ()


def _usual_layer_types(raw: JsonFile, architecture: str, num_layers: int) -> list[str]:
    """Return the types of the layers for a config.json without ``layer_types``."""

    def is_sliding(index: int) -> bool:
        if architecture in ("qwen2", "qwen3"):
            first = raw.get("max_window_layers", 28)
            return bool(index >= first)
        if architecture == "gemma3":
            return (index + 1) % raw.positive_int("sliding_window_pattern", 6) != 0
        return architecture != "gpt_oss" or index % 2 == 0

    return [SLIDING if is_sliding(index) else FULL for index in range(num_layers)]


def load_moe(raw: JsonFile, architecture: str, num_layers: int) -> MoeConfig | None:
    """Parse the mixture of experts, if the architecture has one."""
    if architecture == "qwen3_moe":
        return _qwen3_moe(raw, num_layers)
    if architecture == "gpt_oss":
        return MoeConfig(
            num_experts=raw.positive_int("num_local_experts", raw.get("num_experts")),
            experts_per_token=raw.positive_int("num_experts_per_tok"),
            intermediate_size=raw.positive_int("intermediate_size"),
            normalizes_weights=True,
            layers=frozenset(range(num_layers)),
            clamped=ClampedSwiGlu(
                raw.positive_float("swiglu_alpha", 1.702), raw.positive_float("swiglu_limit", 7.0)
            ),
        )
    return None


def _qwen3_moe(raw: JsonFile, num_layers: int) -> MoeConfig:
    step = raw.positive_int("decoder_sparse_step", 1)
    dense = set(raw.get("mlp_only_layers", []))
    num_experts = raw.positive_int("num_experts", raw.get("num_local_experts"))
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=raw.positive_int("num_experts_per_tok"),
        intermediate_size=raw.positive_int("moe_intermediate_size"),
        normalizes_weights=bool(raw.get("norm_topk_prob", False)),
        layers=frozenset(
            layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
        ),
    )
