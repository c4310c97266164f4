"""Parses the settings of the rotary position embedding in config.json."""

import math
from dataclasses import dataclass

from baton.checkpoints.json_file import JsonFile
from baton.errors import Invalid

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotary position embedding. All types but ``default`` use ``factor``;
    ``llama3`` and ``yarn`` also use ``original_max_position``, the length in tokens for which the
    model was trained first. Cosines and sines are multiplied by ``attention_factor``."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    yarn: "YarnConfig | None" = None

    @property
    def attention_factor(self) -> float:
        return self.yarn.attention_factor if self.yarn else 1.0


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """Parameters of YaRN. Dimensions that rotate more than ``beta_fast`` times within the original
    length keep their frequency; those that rotate less than ``beta_slow`` times are slowed down.
    ``rounds_range``: whether the bounds of the dimensions in between are rounded to integers."""

    beta_fast: float
    beta_slow: float
    attention_factor: float
    rounds_range: bool


def load_rope(raw: JsonFile) -> RopeConfig:
    """Parse the RoPE settings. Older files use rope_theta and rope_scaling, newer ones
    rope_parameters. If there are settings for each type of layer, as in Gemma 3, parse those of the
    layers without a window."""
    return _rope(raw, raw.merged("rope_scaling", "rope_parameters").part("full_attention"))


def local_rope(raw: JsonFile) -> RopeConfig:
    """Parse Gemma 3's RoPE settings for layers with a window."""
    values = raw.merged("rope_parameters").merged("sliding_attention")
    theta = raw.positive_float("rope_local_base_freq", 10_000.0)
    return _rope(raw, values.with_defaults({"rope_theta": theta}))


def _rope(raw: JsonFile, values: JsonFile) -> RopeConfig:
    """Parse the settings ``values`` of the file ``raw``."""
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise Invalid(
            f"{raw.path}: rope type is {kind!r}; supported types: {', '.join(ROPE_TYPES)}"
        )
    if values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise Invalid(f"{raw.path}: partial_rotary_factor must be 1; no other value is supported")
    return RopeConfig(
        theta=values.positive_float("rope_theta", raw.positive_float("rope_theta", 10_000.0)),
        type=kind,
        factor=_yarn_factor(raw, values)
        if kind == "yarn"
        else values.positive_float("factor", 1.0),
        low_freq_factor=values.positive_float("low_freq_factor", 1.0),
        high_freq_factor=values.positive_float("high_freq_factor", 4.0),
        original_max_position=_original_max_position(raw, values),
        yarn=_yarn(raw, values) if kind == "yarn" else None,
    )


def _original_max_position(raw: JsonFile, values: JsonFile) -> int:
    most = raw.positive_int("max_position_embeddings")
    return values.positive_int("original_max_position_embeddings", most)


def _yarn_factor(raw: JsonFile, values: JsonFile) -> float:
    ratio = raw.positive_int("max_position_embeddings") / _original_max_position(raw, values)
    factor = values.positive_float("factor", ratio)
    if factor < 1:
        raise Invalid(f"{values.path}: factor is {factor:g}; YaRN needs a number of at least 1")
    return factor


def _yarn(raw: JsonFile, values: JsonFile) -> YarnConfig:
    factor = _yarn_factor(raw, values)
    fast, slow = values.positive_float("beta_fast", 32.0), values.positive_float("beta_slow", 1.0)
    if fast < slow:
        raise Invalid(
            f"{values.path}: beta_fast is {fast:g} and beta_slow is {slow:g}; beta_fast must be at "
            "least beta_slow"
        )
    usual = _yarn_scale(factor)
    if values.get("mscale") and values.get("mscale_all_dim"):
        scales = (values.positive_float(key) for key in ("mscale", "mscale_all_dim"))
        numerator, denominator = (_yarn_scale(factor, scale) for scale in scales)
        usual = numerator / denominator
    return YarnConfig(
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=values.positive_float("attention_factor", usual),
        rounds_range=bool(values.get("truncate", True)),
    )


def _yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def max_position(raw: JsonFile) -> int:
    """Return the longest context in tokens. Checkpoints with YaRN often state only the length
    without it, such as Qwen3, whose documentation says to add the factor to config.json."""
    most = raw.positive_int("max_position_embeddings")
    values = raw.merged("rope_scaling", "rope_parameters")
    if values.get("rope_type", values.get("type")) != "yarn":
        return most
    return max(most, round(_yarn_factor(raw, values) * _original_max_position(raw, values)))
