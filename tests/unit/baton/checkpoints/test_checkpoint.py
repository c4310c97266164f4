"""Tests that valid model directories are loaded, and that broken ones are reported."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.checkpoints.checkpoint import list_shards, load_model_config, model_digest
from baton.engine.loader import CheckpointWeights
from baton.errors import Invalid
from testkit.model_zoo import make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may break."""
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(path: Path) -> None:
    CheckpointWeights(path, load_model_config(path)).to_torch(CPU, torch.float32)


def change(file: str, **values: object) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        raw = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(raw | values))

    return spoil


def cut(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1])


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(data) and None


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


BAD: list[tuple[Callable[[Path], None], str]] = [
    (lambda path: (path / "config.json").unlink(), r"config\.json: the file is missing"),
    (write("config.json", b"{"), r"config\.json: "),
    (write("config.json", b"[]"), r"config\.json: the file is not a JSON object"),
    (write("config.json", b"\xff{}"), r"config\.json: "),
    (change("config.json", architectures=["GPT2LMHeadModel"]), "supported architectures: Llama"),
    (change("config.json", architectures="x"), "architectures is 'x'"),
    (change("config.json", hidden_size=-4), "hidden_size is -4; it must be a positive integer"),
    (change("config.json", num_hidden_layers="2"), "num_hidden_layers is '2'"),
    (change("config.json", rms_norm_eps=0), "rms_norm_eps is 0"),
    (change("config.json", hidden_act="gelu"), "hidden_act is 'gelu'"),
    (change("config.json", dtype="int8"), "dtype is 'int8'; supported dtypes: float32"),
    (change("config.json", rope_parameters={"rope_type": "dynamic"}), "rope type is 'dynamic'"),
    (
        change("config.json", rope_parameters={"rope_type": "linear", "factor": "2"}),
        "factor is '2'",
    ),
    (change("config.json", rope_theta="x", rope_parameters=None), "rope_theta is 'x'"),
    (
        change("config.json", rope_scaling="linear"),
        "rope_scaling is 'linear'; it must be an object",
    ),
    (
        change("config.json", sliding_window="64", use_sliding_window=True),
        "sliding_window is '64'; it must be a positive integer",
    ),
    (change("config.json", quantization_config={"bits": 4}), "quantization_config"),
    (change("generation_config.json", eos_token_id="end"), "eos_token_id is 'end'"),
    (change("generation_config.json", eos_token_id=True), "eos_token_id is True"),
    (lambda path: (path / "model.safetensors").unlink(), "model.safetensors: the file is missing"),
    (cut, r"model\.safetensors: the file is truncated: it has \d+ of \d+ bytes"),
    (write("model.safetensors", b"short"), "truncated in its header"),
    (write("model.safetensors", b"\xff" * 64), "truncated in its header"),
    (write("model.safetensors", header(b"{nonsense")), "invalid safetensors header"),
    (write("model.safetensors", header(b'{"a": 1}')), "invalid safetensors header"),
    (write("model.safetensors", header(b"[1]")), "invalid safetensors header"),
    (write("model.safetensors", header(b"{}")), "no file has tensor model.embed_tokens.weight"),
    (change("config.json", vocab_size=513), r"embed_tokens.weight has shape \[512, 64\]"),
    (change("config.json", tie_word_embeddings=False), "no file has tensor lm_head.weight"),
    (change("config.json", num_hidden_layers=3), r"no file has tensor model\.layers\.2\."),
    (write("model.safetensors.index.json", b"{}"), "weight_map is missing"),
    (
        write("model.safetensors.index.json", b'{"weight_map": {"a": "other.safetensors"}}'),
        r"other\.safetensors: the file is missing",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), BAD)
def test_bad_directories(model: Path, spoil: Callable[[Path], None], message: str) -> None:
    load(model)
    spoil(model)
    with pytest.raises(Invalid, match=message):
        load(model)


def test_integer_weights_are_refused(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    entries["model.norm.weight"]["dtype"] = "I32"
    new = json.dumps(entries).encode()
    (model / "model.safetensors").write_bytes(header(new) + data[8 + length :])
    with pytest.raises(Invalid, match=r"model\.norm\.weight has dtype I32; supported dtypes: BF16"):
        load(model)


def test_sharded_weights_load_as_one_model(original: Path, tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3", max_shard_size="100KB")
    assert len(list_shards(tmp_path)) > 2
    config = load_model_config(tmp_path)
    one, other = (
        CheckpointWeights(path, config).to_torch(CPU, torch.float32)
        for path in (original, tmp_path)
    )
    assert torch.equal(one.embedding, other.embedding)
    assert all(torch.equal(a.qkv, b.qkv) for a, b in zip(one.layers, other.layers, strict=True))


def test_loading_progress_ends_at_the_total(original: Path) -> None:
    progress: list[tuple[int, int]] = []
    config = load_model_config(original)
    weights = CheckpointWeights(
        original, config, lambda *done_and_total: progress.append(done_and_total)
    )
    weights.to_torch(CPU, torch.float32)
    assert progress[-1][0] == progress[-1][1] > 0
    assert progress == sorted(progress)


def test_eos_ids_come_from_the_generation_config_first(model: Path) -> None:
    assert load_model_config(model).eos_token_ids == (1, 2)
    change("generation_config.json", eos_token_id=[7, 8, 9])(model)
    assert load_model_config(model).eos_token_ids == (7, 8, 9)
    (model / "generation_config.json").unlink()
    change("config.json", eos_token_id=5)(model)
    assert load_model_config(model).eos_token_ids == (5,)


def test_digest_depends_on_weights_and_config(original: Path, model: Path) -> None:
    assert model_digest(model) == model_digest(original)
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (model / "model.safetensors").write_bytes(data)
    changed = model_digest(model)
    assert changed != model_digest(original)
    change("config.json", rope_theta=5.0)(model)
    assert model_digest(model) != changed
