"""Tests which LoRA adapters are accepted, and that all others are refused with the reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.checkpoints import adapter_checkpoint
from baton.checkpoints.adapter_checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    StoredAdapter,
    _AdapterConfig,
    read_adapter,
    target_modules,
)
from baton.checkpoints.checkpoint import DEMO_MODEL, load_model_config
from baton.checkpoints.quick_pattern import is_quick_to_match
from baton.core.adapter import MAX_ADAPTER_NAME, is_adapter_name
from baton.engine.lora.adapter import join_adapter
from baton.errors import Invalid
from testkit.lora_zoo import ATTENTION, make_adapter
from testkit.model_zoo import make_model

SEED = 20261124
CPU = torch.device("cpu")
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", model, targets=ATTENTION)


def read(adapter: Path, model: Path, max_rank: int = 16) -> StoredAdapter:
    return read_adapter(adapter, load_model_config(model), max_rank)


def change_config(adapter: Path, **changes: Any) -> None:
    path = adapter / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(
    adapter: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    path = adapter / WEIGHTS_FILE
    save_file(change(load_file(path)), path)


def test_pairs_have_rank_and_scaling(adapter: Path, model: Path) -> None:
    stored = read(adapter, model)
    assert len(stored.pairs) == 2 * len(ATTENTION)
    assert {(pair.rank, pair.scaling) for pair in stored.pairs} == {(4, 2.0)}
    assert stored.max_rank == 4


def test_patterns_change_rank_and_scaling(model: Path, tmp_path: Path) -> None:
    patterns = {"q_proj": 3, "layers.1.self_attn.v_proj": 6, "^model.layers.0.self_attn.k_proj": 9}
    make_adapter(
        tmp_path, model, targets=ATTENTION, ranks={"q_proj": 3},
        alpha_pattern=patterns, use_rslora=True,
    )  # fmt: skip
    scalings = {pair.module.name[13:]: pair.scaling for pair in read(tmp_path, model).pairs}
    assert scalings["0.self_attn.q_proj"] == pytest.approx(3 / 3**0.5)
    assert scalings["1.self_attn.v_proj"] == pytest.approx(6 / 2)
    assert scalings["0.self_attn.v_proj"] == pytest.approx(8 / 2)
    assert scalings["0.self_attn.k_proj"] == pytest.approx(9 / 2)
    assert scalings["1.self_attn.k_proj"] == pytest.approx(8 / 2)


def test_joined_matrices_give_the_projections_products(adapter: Path, model: Path) -> None:
    config = load_model_config(model)
    layer = join_adapter(read(adapter, model), config, CPU, torch.float32).layers[0]
    assert layer.gate_up is None and layer.down is None and layer.qkv is not None
    x = torch.randn(3, config.hidden_size)
    tensors = load_file(adapter / WEIGHTS_FILE)
    wanted = []
    for name in ("q_proj", "k_proj", "v_proj"):
        prefix = QUERY.replace("q_proj", name)
        a, b = (tensors[f"{prefix}.lora_{each}.weight"] for each in "AB")
        wanted.append(2.0 * x @ a.T @ b.T)
    torch.testing.assert_close(x @ layer.qkv.a.T @ layer.qkv.b.T, torch.cat(wanted, dim=1))


@pytest.mark.parametrize(
    "targets", ["all-linear", ".*self_attn.(q|k|v|o)_proj", r".*\.[qkvo]_proj"]
)
def test_targets_may_be_a_regular_expression(adapter: Path, model: Path, targets: str) -> None:
    change_config(adapter, target_modules=targets)
    if targets == "all-linear":
        with pytest.raises(Invalid, match="targeted, but the file has no weights"):
            read(adapter, model)
    else:
        assert len(read(adapter, model).pairs) == 2 * len(ATTENTION)


def test_layers_may_be_selected(adapter: Path, model: Path) -> None:
    change_config(adapter, layers_to_transform=[1])
    with pytest.raises(Invalid, match=r"weights for model\.layers\.0.*does not target"):
        read(adapter, model)
    change_tensors(adapter, lambda old: {n: t for n, t in old.items() if ".layers.1." in n})
    assert {pair.module.layer for pair in read(adapter, model).pairs} == {1}


def test_digest_covers_weights_and_configuration(adapter: Path, model: Path) -> None:
    digests = {read(adapter, model).digest, read(adapter, model).digest}
    assert len(digests) == 1
    change_config(adapter, lora_alpha=9)
    digests.add(read(adapter, model).digest)
    change_tensors(adapter, lambda old: {name: tensor + 1 for name, tensor in old.items()})
    digests.add(read(adapter, model).digest)
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "only LORA is supported"),
        ({"use_dora": True}, "use_dora is true; this option of peft is not supported"),
        ({"bias": "all"}, "bias is .*only none"),
        ({"lora_bias": True}, "lora_bias is true"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"a_new_option": {"x": 1}}, "a_new_option .*not supported"),
        ({"init_lora_weights": "pissa"}, "changes the base model's weights"),
        ({"target_modules": None}, "target_modules is null"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head.*no such projection"),
        ({"target_modules": ["experts.0.up_proj"]}, "no such projection"),
        ({"target_modules": "(a+)+b"}, "too complex"),
        ({"target_modules": "a*" * 5}, "too complex"),
        ({"target_modules": "x" * 300}, "too complex"),
        ({"target_modules": "(?x)(.+) +x"}, "too complex"),
        ({"target_modules": "(.+)(?#)+x"}, "too complex"),
        ({"target_modules": "(?:.|.)" * 30 + "x"}, "too complex"),
        ({"rank_pattern": {".?" * 40 + "x": 4}}, "too complex"),
        ({"alpha_pattern": {"(": 4}}, r"alpha_pattern is '\(': missing \)"),
        ({"target_modules": "("}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "does not target"),
        ({"layers_to_transform": "0"}, "layers_to_transform"),
        ({"layers_to_transform": [0], "layers_pattern": "blocks"}, "layers_pattern"),
        ({"r": 0}, "ranks must be positive"),
        ({"r": True}, "ranks must be positive"),
        ({"r": 5}, "for rank 5 and this model they must be"),
        ({"r": 17}, "rank 17; max_lora_rank is 16"),
        ({"rank_pattern": ["q_proj"]}, "must be an object"),
        ({"rank_pattern": {"q_proj": 5}}, "for rank 5"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
    ],
)  # fmt: skip
def test_configuration_is_refused(
    adapter: Path, model: Path, changes: dict[str, Any], reason: str
) -> None:
    change_config(adapter, **changes)
    with pytest.raises(Invalid, match=reason):
        read(adapter, model)


SLOW = ".*.*[a-z]*{}_"
"""A pattern that takes long for each name."""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank_pattern", {SLOW.format(number): 4 for number in range(3000)}),
        ("alpha_pattern", {SLOW.format(number): 4 for number in range(3000)}),
        ("target_modules", ["q_proj"] * 50_000),
        ("exclude_modules", [f"x{number}" for number in range(50_000)]),
    ],
)
def test_too_many_patterns_are_refused(
    adapter: Path, model: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    """The limit is lowered, because the tiny model has few layers."""
    monkeypatch.setattr(adapter_checkpoint, "MAX_MATCHING_SECONDS", 0.02)
    change_config(adapter, **{key: value})
    with pytest.raises(Invalid, match=rf"{key} has too many patterns: .* more than 0\.02 s$"):
        read(adapter, model)


def test_rank_for_each_layer_of_a_large_model_is_accepted() -> None:
    """As initialization ``eva`` writes them."""
    config = replace(load_model_config(DEMO_MODEL), num_layers=80)
    modules = {each.name: each for each in target_modules(config)}
    ranks = {name: 1 + number % 16 for number, name in enumerate(modules)}
    values = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "rank_pattern": ranks}
    parsed = _AdapterConfig(Path("adapter"), json.dumps(values).encode())
    assert {name: parsed.rank(name) for name in modules} == ranks


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
        r"^(?!.*lm_head).*(q_proj|v_proj)$",
        r"(model\.)?layers\.[0-9]+\.self_attn\.\w+_proj",
        ".*" * 3,
    ],
)
def test_usual_patterns_are_quick_to_match(pattern: str) -> None:
    assert is_quick_to_match(pattern)


def test_path_that_is_too_long_is_refused_with_the_reason_first(model: Path) -> None:
    with pytest.raises(Invalid, match=r"^File name too long: /x"):
        read(Path("/" + "x" * 3000), model)


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    """peft adapts experts that are stored as one tensor by ``target_parameters``."""
    model = make_model(tmp_path / "model", "gpt-oss")
    adapter = make_adapter(tmp_path / "adapter", model, targets=ATTENTION)
    assert len(read(adapter, model).pairs) == 2 * len(ATTENTION)
    change_config(adapter, target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(Invalid, match=r"target_parameters .*this option of peft is not supported"):
        read(adapter, model)
    change_config(adapter, target_parameters=None, target_modules=[*ATTENTION, "router"])
    with pytest.raises(Invalid, match=r"router.*no such projection that can be adapted"):
        read(adapter, model)
    change_config(adapter, target_modules=list(ATTENTION))
    name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    change_tensors(adapter, lambda old: {**old, name: torch.ones(2, 2)})
    with pytest.raises(Invalid, match="is not supported: adapters of experts"):
        read(adapter, model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (QUERY.replace("q_proj", "q_proj.lora_magnitude_vector"), "DoRA"),
        ("base_model.model.lm_head.lora_A.weight", "the head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings"),
        ("base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight", "experts"),
        (f"{QUERY}.lora_B.bias", "biases"),
        (QUERY.replace("layers.0", "layers.7") + ".lora_A.weight", "does not belong"),
        ("x", "does not belong"),
    ],
)
def test_other_tensors_are_refused(adapter: Path, model: Path, name: str, reason: str) -> None:
    change_tensors(adapter, lambda old: {**old, name: torch.ones(2, 2)})
    with pytest.raises(Invalid, match=reason):
        read(adapter, model)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(4, 63), "must be \\[4, 64\\] and"),
        (torch.ones(64), "not a matrix"),
        (torch.ones(4, 64, dtype=torch.float64), "has dtype 'F64'"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    adapter: Path, model: Path, tensor: torch.Tensor, reason: str
) -> None:
    change_tensors(adapter, lambda old: {**old, f"{QUERY}.lora_A.weight": tensor})
    with pytest.raises(Invalid, match=reason):
        read(adapter, model)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused(adapter: Path, model: Path, value: float) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[f"{QUERY}.lora_B.weight"][3, 1] = value
        return tensors

    change_tensors(adapter, damage)
    stored = read(adapter, model)
    with pytest.raises(Invalid, match=r"model\.layers\.0\.self_attn\.q_proj is not finite"):
        join_adapter(stored, load_model_config(model), CPU, torch.float32)


def test_missing_and_half_modules_are_refused(adapter: Path, model: Path) -> None:
    change_tensors(
        adapter, lambda old: {n: t for n, t in old.items() if n != f"{QUERY}.lora_B.weight"}
    )
    with pytest.raises(Invalid, match="must have both lora_A and lora_B"):
        read(adapter, model)
    change_tensors(adapter, lambda old: {n: t for n, t in old.items() if QUERY not in n})
    with pytest.raises(Invalid, match="q_proj is targeted, but the file has no weights"):
        read(adapter, model)


def test_missing_files_are_refused(adapter: Path, model: Path) -> None:
    (adapter / WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
    with pytest.raises(Invalid, match=r"adapter_model\.safetensors: the file is missing"):
        read(adapter, model)
    with pytest.raises(Invalid, match=r"adapter_config\.json: the file is missing"):
        read(adapter / "nowhere", model)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 16,
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"x": {}}',
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
    ids=range(6),
)
def test_damaged_weights_are_refused(adapter: Path, model: Path, data: bytes) -> None:
    (adapter / WEIGHTS_FILE).write_bytes(data)
    with pytest.raises(Invalid, match=r"adapter_model\.safetensors: "):
        read(adapter, model)


def test_truncated_weights_are_refused(adapter: Path, model: Path) -> None:
    path = adapter / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(Invalid, match="not a matrix in a file of"):
        read(adapter, model)


def test_files_that_are_too_large_are_refused(adapter: Path, model: Path) -> None:
    with (adapter / WEIGHTS_FILE).open("ab") as file:
        file.truncate(200 * 2**20)
    with pytest.raises(Invalid, match=r"larger than .* the maximum for this model"):
        read(adapter, model)
    (adapter / CONFIG_FILE).write_text(" " * (2**20 + 1))
    with pytest.raises(Invalid, match="larger than 1048576 bytes"):
        read(adapter, model)


def test_damaged_bytes_are_refused_with_a_reason(adapter: Path, model: Path) -> None:
    """Whatever bytes of the two files are overwritten, removed or repeated, reading raises nothing
    but Invalid."""
    chance = np.random.default_rng(SEED)
    config = load_model_config(model)
    originals = {name: (adapter / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    num_refused = 0
    for _ in range(600):
        name = (CONFIG_FILE, WEIGHTS_FILE)[chance.integers(2)]
        data = bytearray(originals[name])
        # Most of the weights file is numbers; the header is at its beginning.
        start = int(chance.integers(min(len(data), 2500)))
        end = min(start + int(chance.integers(1, 9)), len(data))
        old, noise = bytes(data[start:end]), chance.bytes(end - start)
        data[start:end] = (b"", noise, old * 2, b'"', b"9" * 20, b"[]")[chance.integers(6)]
        (adapter / name).write_bytes(data)
        try:
            join_adapter(read_adapter(adapter, config, 16), config, CPU, torch.float32)
        except Invalid:
            num_refused += 1
        (adapter / name).write_bytes(originals[name])
    assert num_refused > 300


@pytest.mark.parametrize("name", ["a", "acme/sql:v2.1", "7b-chat", "x" * MAX_ADAPTER_NAME])
def test_names(name: str) -> None:
    assert is_adapter_name(name)


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\n", "ä", "x" * (MAX_ADAPTER_NAME + 1)])
def test_invalid_names(name: str) -> None:
    assert not is_adapter_name(name)
