"""Tests that contexts that YaRN extends give the tokens of transformers."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.checkpoints.checkpoint import load_model_config, load_model_limits
from baton.engine.rope import inverse_frequencies
from baton.errors import Invalid
from testkit.model_zoo import make_model
from tests.exactness import EngineAlone, Score, reference_of

SEED = 20261126
QWEN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip
"""As Qwen3's documentation says, for a model trained with 64 tokens."""

VARIANTS: dict[str, dict[str, Any]] = {
    "as Qwen3": {},
    "attention factor": {"attention_factor": 1.5},
    "mscale": {"mscale": 0.7, "mscale_all_dim": 1.2},
    "betas": {"beta_fast": 10.0, "beta_slow": 2.0},
    "exact range": {"truncate": False},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("head_dim", [20, 128])
def test_frequencies_equal_those_of_transformers(
    tmp_path: Path, fields: dict[str, Any], head_dim: int
) -> None:
    parameters = QWEN | {"original_max_position_embeddings": 32_768} | fields
    config = Qwen3Config(
        head_dim=head_dim, rope_parameters=dict(parameters), max_position_embeddings=131_072
    )
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    write_config(tmp_path, {"head_dim": head_dim, "rope_parameters": parameters})
    rope = load_model_config(tmp_path).rope
    assert torch.equal(inverse_frequencies(rope, head_dim), wanted)
    assert rope.attention_factor == factor


def write_config(folder: Path, fields: dict[str, Any]) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 512,
        "max_position_embeddings": 40_960,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("cpu_kernels", "original", "lengths"),
    [("auto", 64, (5, 60, 130, 230)), ("off", 64, (5, 60, 130, 230)), ("auto", 4096, (16_000,))],
)
def test_tokens_beyond_the_original_length_equal_those_of_transformers(
    tmp_path: Path, cpu_kernels: str, original: int, lengths: Sequence[int]
) -> None:
    print(f"seed {SEED}")
    parameters = QWEN | {"original_max_position_embeddings": original}
    make_model(
        tmp_path, "qwen3", seed=SEED, rope_parameters=parameters, max_position_embeddings=original
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    chance = np.random.default_rng(SEED)
    references = [
        reference_of(model, chance.integers(model.config.vocab_size, size=length).tolist(), 24)
        for length in lengths
    ]
    alone = EngineAlone(tmp_path, 256, 16, max(lengths), cpu_kernels=cpu_kernels)
    score = alone.score(references, len(lengths), False)
    assert score == Score(24 * len(lengths), ties=0, differences=0)


def test_context_is_as_long_as_the_factor_says(tmp_path: Path) -> None:
    """Qwen3's config.json says 40,960, of which 32,768 were trained."""
    original = {"original_max_position_embeddings": 32_768}
    write_config(tmp_path, {"rope_scaling": {"type": "yarn", "factor": 4.0} | original})
    assert load_model_config(tmp_path).max_position_embeddings == 131_072
    assert load_model_limits(tmp_path).max_position_embeddings == 131_072
    write_config(tmp_path, {"rope_scaling": {"type": "yarn"} | original})
    assert load_model_config(tmp_path).rope.factor == 1.25
    assert load_model_limits(tmp_path).max_position_embeddings == 40_960
    assert load_model_config(tmp_path).rope.attention_factor == 0.1 * math.log(1.25) + 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0.5}, "factor is 0.5; YaRN needs a number of at least 1"),
        ({"factor": "4"}, "factor is '4'; it must be a positive number"),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_fast is 1 and beta_slow is 2; beta_fast must be"),
        ({"attention_factor": 0}, "attention_factor is 0; it must be a positive number"),
    ],
)
def test_wrong_parameters_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_config(tmp_path, {"rope_parameters": QWEN | fields})
    with pytest.raises(Invalid, match=message):
        load_model_config(tmp_path)
