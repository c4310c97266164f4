"""Tests what families of models differ in: windows, sinks, norms, biases, weights in MXFP4."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.checkpoints.checkpoint import ModelConfig, load_model_config
from baton.engine.loader import CheckpointWeights
from baton.errors import Invalid
from testkit.model_zoo import BASE, make_model
from tests.exactness import EngineAlone, Score, reference_of

SEED = 20261126
ANSWER = 16


def config_of(folder: Path, architecture: str, **fields: Any) -> ModelConfig:
    config = BASE | {"architectures": [architecture], "head_dim": 16} | fields
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder)


def windows_of(folder: Path, architecture: str, **fields: Any) -> tuple[int | None, ...]:
    return config_of(folder, architecture, num_hidden_layers=4, **fields).traits.windows


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 9}, (9, 9, 9, 9)),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("MistralForCausalLM", {"sliding_window": 4096}, ()),  # as long as the longest context
        ("MistralForCausalLM", {"max_position_embeddings": 9000}, (4096,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 9}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 9, "use_sliding_window": True}, ()),  # 28 layers
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 9),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": [SLIDING, FULL, SLIDING, FULL],
            },
            (9, None, 9, None),
        ),
        (
            "Gemma3ForCausalLM",
            {"sliding_window": 9, "sliding_window_pattern": 3},
            (9, 9, None, 9),
        ),
        ("LlamaForCausalLM", {"sliding_window": 9}, ()),  # ignored by transformers, too
    ],
)
def test_windows_are_those_of_transformers(
    tmp_path: Path, architecture: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert windows_of(tmp_path, architecture, **fields) == windows


def test_gemma_has_a_rotary_embedding_for_each_type_of_layer(tmp_path: Path) -> None:
    old = {
        "rope_theta": 5e5, "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    new = {
        "rope_parameters": {
            FULL: {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    for fields in (old, new):
        config = config_of(tmp_path, "Gemma3ForCausalLM", **fields)
        local = config.traits.local_rope
        assert (config.rope.type, config.rope.theta, config.rope.factor) == ("linear", 5e5, 8.0)
        assert local is not None and (local.type, local.theta) == ("default", 2e4)
    config = config_of(tmp_path, "Gemma3ForCausalLM")
    assert config.rope.theta == 1e6
    assert config.traits.local_rope is not None and config.traits.local_rope.theta == 1e4


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        (
            "Gemma3ForCausalLM",
            {"layer_types": [FULL], "sliding_window": 9},
            "layer_types is .* must have 2 items",
        ),
        ("GptOssForCausalLM", {"layer_types": ["chunked_attention"] * 2}, "layer_types is"),
        (
            "MistralForCausalLM",
            {"sliding_window": 9, "layer_types": [FULL, SLIDING]},
            "layer_types is not supported; all layers have the same window",
        ),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "only FP8"),
        ("Gemma3ForConditionalGeneration", {}, "supported architectures: .*Gemma3ForCausalLM"),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(
    tmp_path: Path, architecture: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        config_of(tmp_path, architecture, num_local_experts=4, num_experts_per_tok=2, **fields)


@pytest.mark.parametrize("name", ["mistral-window", "gemma3", "gpt-oss"])
def test_a_window_that_is_one_token_longer_changes_answers(tmp_path: Path, name: str) -> None:
    """The references would not notice a wrong window if no answer depended on its first token."""
    print(f"seed {SEED}")
    make_model(tmp_path, name, seed=SEED)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    chance = np.random.default_rng(SEED)
    references = [
        reference_of(model, chance.integers(500, size=length).tolist(), ANSWER)
        for length in (65, 130, 300)
    ]
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"sliding_window": config["sliding_window"] + 1}))
    assert EngineAlone(tmp_path, 128, 16, 300).score(references, 4, False).differences > 0


@pytest.mark.parametrize(
    ("name", "window"), [("mistral-window", 4096), ("gemma3", 1024), ("gpt-oss", 128)]
)
def test_tokens_of_a_context_of_16k_equal_those_of_transformers(
    tmp_path: Path, name: str, window: int
) -> None:
    print(f"seed {SEED}")
    make_model(tmp_path, name, seed=SEED, sliding_window=window, max_position_embeddings=20_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = np.random.default_rng(SEED).integers(500, size=16_000).tolist()
    reference = reference_of(model, prompt, ANSWER, chunk=1000)
    alone = EngineAlone(tmp_path, 512, 16, len(prompt))
    assert alone.score([reference], 1, False) == Score(ANSWER, ties=0, differences=0)


def write_in_mxfp4(plain: Path, chance: np.random.Generator) -> None:
    """Replace the experts' matrices of a gpt-oss checkpoint by random codes and scales in MXFP4.
    The scales make numbers of about 0.2."""
    file = plain / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, ins, rows = tensors.pop(name).shape
        groups = ins // 32
        blocks = chance.integers(256, size=(experts, rows, groups, 16), dtype=np.uint8)
        scales = chance.integers(123, 126, size=(experts, rows, groups), dtype=np.uint8)
        tensors[name + "_blocks"] = torch.from_numpy(blocks)
        tensors[name + "_scales"] = torch.from_numpy(scales)
    save_file(tensors, file, {"format": "pt"})
    path = plain / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def decoded_copy(quantized: Path, folder: Path) -> Path:
    """Write a plain checkpoint with the weights that transformers decodes from one in MXFP4."""
    make_model(folder, "gpt-oss")
    tensors = load_file(quantized / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
        decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        tensors[name.removesuffix("_blocks")] = decoded.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("cpu_kernels", ["auto", "off"])
def test_weights_in_mxfp4_give_the_tokens_of_transformers(tmp_path: Path, cpu_kernels: str) -> None:
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    quantized = make_model(tmp_path / "quantized", "gpt-oss", seed=SEED)
    write_in_mxfp4(quantized, chance)
    plain = decoded_copy(quantized, tmp_path / "plain")
    stored, wanted = (
        CheckpointWeights(path, load_model_config(path)).to_torch(
            torch.device("cpu"), torch.float32
        )
        for path in (quantized, plain)
    )
    for one, other in zip(stored.layers, wanted.layers, strict=True):
        for name in ("expert_gate_up", "expert_down"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    references = [
        reference_of(model, chance.integers(500, size=length).tolist(), ANSWER)
        for length in (5, 100, 200)
    ]
    alone = EngineAlone(quantized, 128, 16, 200, cpu_kernels=cpu_kernels)
    assert alone.score(references, 3, False) == Score(3 * ANSWER, ties=0, differences=0)
