"""Tests that checkpoint shards are mapped, validated, and converted while they are packed."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.checkpoints.checkpoint import load_model_config
from baton.engine.loader import CheckpointWeights
from baton.engine.native.matrix import KernelThreadPool, PackedMatrix
from baton.engine.shards import CheckpointShards, StoredTensor
from baton.errors import Invalid
from testkit.model_zoo import ZOO, make_model
from tests.unit.baton.engine.native_helpers import FORMATS, needs_kernels

CPU = torch.device("cpu")
SEED = 20261121


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


@needs_kernels
@pytest.mark.parametrize("to", FORMATS, ids=str)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stacked_tensors_are_packed_as_if_they_were_joined(
    kept: torch.dtype, to: torch.dtype, tmp_path: Path
) -> None:
    """The result has the same bits as torch's conversion of the joined tensors, for any format."""
    torch.manual_seed(SEED)
    parts = {
        name: torch.randn(rows, 48).to(kept) for name, rows in zip("abc", [70, 1, 33], strict=True)
    }
    shards = CheckpointShards(write(tmp_path, **parts))
    team = KernelThreadPool(2)
    stack = shards.stack(list("abc"), [70, 1, 33], 48)
    packed = PackedMatrix(team, stack, dtype=to)
    joined = PackedMatrix(team, torch.cat(list(parts.values())).to(to))
    assert stack.shape == (104, 48) and torch.equal(packed.tensor, joined.tensor)
    gated = PackedMatrix(team, shards.stack(["a", "c", "b"], [70, 33, 1], 48), gated=True, dtype=to)
    whole = torch.cat([parts[name] for name in "acb"]).to(to)
    assert torch.equal(gated.tensor, PackedMatrix(team, whole, gated=True).tensor)


@pytest.mark.parametrize("name", ZOO)
def test_torch_weights_equal_the_files(name: str, tmp_path: Path) -> None:
    make_model(tmp_path, name, seed=SEED)
    config, wanted = load_model_config(tmp_path), load_file(tmp_path / "model.safetensors")
    weights = CheckpointWeights(tmp_path, config).to_torch(CPU, torch.float32)
    prefix = "model.layers.1.self_attn."
    qkv = torch.cat([wanted[f"{prefix}{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(weights.layers[1].qkv, qkv)
    assert torch.equal(weights.embedding, wanted["model.embed_tokens.weight"])
    assert (weights.head is weights.embedding) == config.tie_word_embeddings
    if config.moe is not None:
        experts = weights.layers[1].expert_gate_up
        prefix = "model.layers.1.mlp.experts."
        if name == "gpt-oss":
            expected = wanted[prefix + "gate_up_proj"][2].T
        else:
            expected = torch.cat(
                [wanted[f"{prefix}2.{part}_proj.weight"] for part in ("gate", "up")]
            )
        assert experts is not None and torch.equal(experts[2], expected)


def test_layers_are_loaded_in_file_order(tmp_path: Path) -> None:
    """Files are sorted by name, so that layer 10 comes before layer 2."""
    make_model(tmp_path, "qwen3", num_hidden_layers=12)
    stored = CheckpointWeights(tmp_path, load_model_config(tmp_path))
    assert stored.layer_order == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


def test_progress_counts_each_tensor_once_and_pages_are_released(tmp_path: Path) -> None:
    """A page of the mapped file that was released is read again when it is needed."""
    reported: list[tuple[int, int]] = []
    tensors = {"a": torch.randn(64, 2048), "b": torch.randn(64, 2048), "c": torch.randn(5)}
    shards = CheckpointShards(write(tmp_path, **tensors), lambda *each: reported.append(each))
    first, second = shards.stack(["a", "b"], [64, 64], 2048), shards.stack(["b"], [64], 2048)
    size = 64 * 2048 * 4
    for _ in range(2):
        assert torch.equal(second.join(CPU, torch.float32), tensors["b"])
    first.mark_used()
    assert reported == [(size, 3 * size), (size, 3 * size), (2 * size, 3 * size)]


def test_single_tensor_is_not_copied(tmp_path: Path) -> None:
    """The tensor is the mapped file itself, so that processes on the same host share its memory.
    The mapping outlives the shards."""
    tensor = torch.randn(8, 16)
    joined = (
        CheckpointShards(write(tmp_path, a=tensor)).stack(["a"], [8], 16).join(CPU, torch.float32)
    )
    maps = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in maps if str(tmp_path) in line]
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    assert start <= joined.data_ptr() < end and torch.equal(joined, tensor)


def test_stacked_experts_are_split() -> None:
    parts = [torch.full((2, 3), float(n)) for n in range(8)]
    used: list[StoredTensor] = []
    one, *others = StoredTensor(parts, (4, 4, 3), used.append).split()
    assert [each.shape for each in (one, *others)] == [(4, 3)] * 4
    assert others[2].join(CPU, torch.float32).tolist() == [[6.0] * 3] * 2 + [[7.0] * 3] * 2
    assert used == [others[2]]


def change_header(path: Path, **changes: object) -> None:
    """Change fields in the header entry of the tensor ``a``."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    entries["a"] |= changes
    new = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        (
            {"data_offsets": [4, 128]},
            "a takes bytes [4, 128) = 124 bytes, but its shape [4, 8] in F32 needs 128 bytes",
        ),
        ({"data_offsets": [96, 64]}, "tensor a takes bytes [96, 64)"),
        ({"data_offsets": [0, 1 << 40]}, "truncated"),
        ({"data_offsets": [-8, 120]}, "invalid safetensors header"),
        ({"data_offsets": [0.0, 128.0]}, "invalid safetensors header"),
        ({"data_offsets": [0]}, "invalid safetensors header"),
        ({"shape": None}, "invalid safetensors header"),
        ({"dtype": 7}, "invalid safetensors header"),
        ({"dtype": "BF16"}, "its shape [4, 8] in BF16 needs 64 bytes"),
    ],
    ids=str,
)
def test_inconsistent_headers_are_rejected(
    changes: dict[str, object], reported: str, tmp_path: Path
) -> None:
    change_header(write(tmp_path, a=torch.ones(4, 8)) / "model.safetensors", **changes)
    with pytest.raises(Invalid) as caught:
        CheckpointShards(tmp_path).stack(["a"], [4], 8)
    assert reported in str(caught.value) and "model.safetensors" in str(caught.value)


def test_tensors_of_different_formats_can_not_be_stacked(tmp_path: Path) -> None:
    shards = CheckpointShards(write(tmp_path, a=torch.ones(2, 4), b=torch.ones(2, 4).half()))
    with pytest.raises(Invalid, match="a, b have different dtypes"):
        shards.stack(["a", "b"], [2, 2], 4)
