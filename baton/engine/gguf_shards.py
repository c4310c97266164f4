"""Weights in a GGUF file, decoded when they are used. So at most one matrix is in memory twice."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from baton.checkpoints.checkpoint import GGUF_INDEX
from baton.engine.quantization import INT4_BLOCK_TYPES, Int4Codes
from baton.engine.shards import CheckpointShards, Progress, StoredTensor
from baton.errors import Invalid

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a GGUF file: ``raw`` are its bytes, a view of the file, [rows, bytes of a row]
    (for a vector, a row for each number), in blocks of ``type``. ``shape`` is the shape of the
    decoded tensor."""

    raw: torch.Tensor
    type: str
    shape: Sequence[int]
    heads: int = 0
    subtract: float = 0.0

    def rows(self) -> torch.Tensor:
        """Return ``raw`` with its rows as Hugging Face orders them, where llama.cpp permutes the
        rows of each of ``heads`` heads: it has rows of the head's halves in turn."""
        if not self.heads:
            return self.raw
        head_dim = len(self.raw) // self.heads
        order = torch.arange(len(self.raw)).view(self.heads, head_dim // 2, 2).transpose(1, 2)
        return self.raw[order.reshape(-1)]

    def decode(self) -> torch.Tensor:
        """Return the weights: in their own format if that is a float format, else in FP32."""
        rows = self.rows()
        if self.type in _FLOATS:
            decoded = rows.view(_FLOATS[self.type]).view(*self.shape)
        else:
            decoded = torch.from_numpy(_dequantize(rows, self.type)).view(*self.shape)
        return decoded - self.subtract if self.subtract else decoded


class GgufWeight(StoredTensor):
    """A weight of ``shape`` that consists of tensors of a GGUF file, stacked along their rows.
    ``parts`` are decoded each time, in FP32 unless all are in the same float format. ``release`` is
    called with the bytes that were used."""

    def __init__(
        self,
        tensors: Sequence[GgufTensor],
        shape: Sequence[int],
        release: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        self.tensors = tuple(tensors)
        self.shape = tuple(shape)
        self.scales = ()
        self._release = release

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        return tuple(tensor.decode().to(self.dtype) for tensor in self.tensors)

    @property
    def int4_parts(self) -> Sequence[torch.Tensor | Int4Codes]:
        """The parts for a matrix in int4: codes where the file has just these, else as decoded."""
        return tuple(
            Int4Codes.from_gguf(tensor.rows(), tensor.type)
            if tensor.type in INT4_BLOCK_TYPES
            else tensor.decode()
            for tensor in self.tensors
        )

    @property
    def dtype(self) -> torch.dtype:
        types = {tensor.type for tensor in self.tensors}
        return _FLOATS.get(types.pop(), torch.float32) if len(types) == 1 else torch.float32

    def split(self) -> list[StoredTensor]:
        count, rows, ins = self.shape
        each = len(self.tensors) // count
        assert each * count == len(self.tensors)
        return [
            GgufWeight(self.tensors[n * each : (n + 1) * each], (rows, ins), self._release)
            for n in range(count)
        ]

    def join(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        width = self.shape[-1] if len(self.shape) > 1 else 1
        joined = torch.empty((prod(self.shape) // width, width), dtype=dtype, device=device)
        start = 0
        for tensor in self.tensors:
            rows = prod(tensor.shape) // width
            joined[start : start + rows] = tensor.decode().view(rows, width)
            start += rows
        self.mark_used()
        return joined.view(self.shape)

    def mark_used(self) -> None:
        self._release([tensor.raw for tensor in self.tensors])


class GgufShards(CheckpointShards):
    """The weights in the GGUF file that the folder ``path`` describes
    (:mod:`baton.checkpoints.gguf`). Raises Invalid as :class:`CheckpointShards` does."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        super().__init__(path, progress)
        self._read: set[str] = set()

    def check_all_read(self) -> None:
        if unread := sorted(self._entries.keys() - self._read):
            raise Invalid(
                f"{self._entries[unread[0]].shard.path.resolve()}: the engine does not support "
                f"models with {', '.join(unread[:3])}, which would be left out"
            )

    def _list_tensors(self, file: Path) -> tuple[dict[str, Any], int]:
        index: dict[str, Any] = json.loads((self.path / GGUF_INDEX).read_text("utf-8"))
        most = max(entry["offset"] + entry["size"] for entry in index.values())
        if file.stat().st_size < most:
            raise Invalid(f"{file.resolve()}: the file is truncated: it should have {most} bytes")
        return index, 0

    def stack(self, names: Sequence[str], rows: Sequence[int], *rest: int) -> StoredTensor:
        tensors = [self._tensor(name, size, *rest) for name, size in zip(names, rows, strict=True)]
        return GgufWeight(tensors, (sum(rows), *rest), self._release)

    def stack_experts(self, names: Sequence[Sequence[str]], rows: int, ins: int) -> StoredTensor:
        tensors = [self._tensor(name, rows // len(each), ins) for each in names for name in each]
        return GgufWeight(tensors, (len(names), rows, ins), self._release)

    def file_position(self, stack: StoredTensor) -> tuple[Path, int]:
        assert isinstance(stack, GgufWeight)
        shard, start, _ = self._places[stack.tensors[0].raw.data_ptr()]
        return shard.path, start

    def _tensor(self, name: str, *shape: int) -> GgufTensor:
        shard, entry = self._entry(name, *shape)
        raw = self._map_tensor(shard, torch.uint8, entry["offset"], entry["size"])
        self._read.add(name)
        return GgufTensor(
            raw.view(shape[0], -1), entry["type"], shape,
            entry.get("heads", 0), entry.get("subtract", 0.0),
        )  # fmt: skip


def _dequantize(rows: torch.Tensor, kind: str) -> Any:
    """Decode rows of blocks, [rows, bytes of a row], to FP32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(rows.numpy(), GGMLQuantizationType[kind])
