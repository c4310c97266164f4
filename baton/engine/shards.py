"""A checkpoint's files, mapped: tensors are views of them, and read when they are used."""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from baton.checkpoint import Fp8Format, list_shards, read_shard_header
from baton.engine.quantization import E4M3, QuantizedCodes
from baton.errors import Invalid

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FORMATS = {**_FLOATS, "F8_E4M3": E4M3}


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file. What is written to ``map`` is never seen by anybody else; nobody does."""

    path: Path
    map: mmap.mmap
    data_start: int


@dataclass(frozen=True, slots=True)
class _Entry:
    shard: Shard
    told: dict[str, Any]


class StoredTensor:
    """A tensor as the checkpoint has it, in its own format: ``parts`` one below the other.

    ``shape`` is the whole's; of ``[num_experts, rows, ins]`` the matrices lie below one another,
    too. ``scales``: of each part that is in FP8, where they lie. Who has used it says so
    (:meth:`used`), which counts it, and gives back its pages.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        shape: Sequence[int],
        on_used: Callable[["StoredTensor"], None] = lambda stack: None,
        scales: Sequence["StoredScales"] = (),
    ) -> None:
        assert sum(part.numel() for part in parts) == prod(shape), f"{[*shape]}"
        assert len({part.dtype for part in parts}) == 1
        assert len(scales) == (len(parts) if parts[0].dtype is E4M3 else 0)
        self.parts = tuple(parts)
        self.shape = tuple(shape)
        self.scales = tuple(scales)
        self._on_used = on_used

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def in_fp8(self) -> bool:
        return self.dtype is E4M3

    def split(self) -> list["StoredTensor"]:
        """The matrices of ``[count, rows, ins]``. Each of them has whole parts."""
        count, rows, ins = self.shape
        each = len(self.parts) // count
        assert each * count == len(self.parts)
        return [
            StoredTensor(
                self.parts[n * each : (n + 1) * each],
                (rows, ins),
                self._on_used,
                self.scales[n * each : (n + 1) * each],
            )
            for n in range(count)
        ]

    def join(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """One tensor. Without anything to convert or to join it is the mapped file itself, which
        processes of one host share."""
        assert not self.in_fp8, "codes are not weights"
        if len(self.parts) == 1:
            joined = self.parts[0].to(device=device, dtype=dtype)
        else:
            width = self.shape[-1] if len(self.shape) > 1 else 1
            joined = torch.empty((prod(self.shape) // width, width), dtype=dtype, device=device)
            start = 0
            for part in self.parts:
                rows = part.numel() // width
                joined[start : start + rows] = part.view(rows, width)
                start += rows
        self.used()
        return joined.view(self.shape)

    def codes(self, device: torch.device) -> QuantizedCodes:
        """Of one that is in FP8, all matrices below one another."""
        parts = [
            scales.of(part, device) for part, scales in zip(self.parts, self.scales, strict=True)
        ]
        codes = QuantizedCodes.join(parts)
        self.used()
        return codes

    def used(self) -> None:
        self._on_used(self)


@dataclass(frozen=True, slots=True)
class StoredScales:
    """``table`` [rows, groups], each of ``tall`` by ``group`` codes, as :class:`QuantizedCodes` has
    them."""

    table: torch.Tensor
    tall: int
    group: int

    def of(self, part: torch.Tensor, device: torch.device) -> QuantizedCodes:
        table = self.table.to(device, torch.float32)
        return QuantizedCodes(part.to(device), table, self.group, self.tall)


class CheckpointShards:
    """All files of ``path``. Raises Invalid that names the file, and the tensor.

    ``fp8``: how the checkpoint keeps matrices in FP8, if it does. ``progress`` hears of what was
    used, of all that was asked for until then.
    """

    def __init__(
        self, path: Path, progress: Progress | None = None, fp8: Fp8Format | None = None
    ) -> None:
        self.path = path
        self._fp8 = fp8
        self._progress = progress or (lambda done, total: None)
        self._entries: dict[str, _Entry] = {}
        self._places: dict[int, tuple[Shard, int, int]] = {}
        self._unused: set[int] = set()
        self._total_bytes = self._done_bytes = 0
        for file in list_shards(path):
            header, data_start = read_shard_header(file)
            shard = Shard(file, _map(file), data_start)
            told = {name: entry for name, entry in header.items() if name != "__metadata__"}
            self._entries |= {name: _Entry(shard, entry) for name, entry in told.items()}

    def stack(self, names: Sequence[str], rows: Sequence[int], *rest: int) -> StoredTensor:
        """Tensors of ``rows[i]`` rows each. They are of one format."""
        parts = [self._view(name, count, *rest) for name, count in zip(names, rows, strict=True)]
        formats = sorted({str(part.dtype) for part in parts})
        if len(formats) > 1:
            raise Invalid(f"{self.path}: {', '.join(names)} have different dtypes: {formats}")
        return StoredTensor(parts, (sum(rows), *rest), self._used, self._scales(names, parts))

    def many(self, names: Sequence[Sequence[str]], rows: int, ins: int) -> StoredTensor:
        """[len(names), rows, ins]: the matrices of experts, each of as many tensors."""
        flat = [name for each in names for name in each]
        parts = [self._view(name, rows // len(each), ins) for each in names for name in each]
        if len({part.dtype for part in parts}) > 1:
            raise Invalid(f"{self.path}: {names[0][0]} and others have different dtypes")
        return StoredTensor(parts, (len(names), rows, ins), self._used, self._scales(flat, parts))

    def number(self, name: str, default: float) -> float:
        """A tensor of one number, or ``default`` where there is none."""
        if name not in self._entries:
            return default
        view = self._view(name, *self._shape(name))
        if view.numel() != 1 or not 0 < float(view) < float("inf"):
            raise Invalid(f"{self.path}: {name} is {view.tolist()}, and must be a positive number")
        self._used(StoredTensor([view.view(1)], [1]))
        return float(view)

    def _scales(
        self, names: Sequence[str], parts: Sequence[torch.Tensor]
    ) -> Sequence[StoredScales]:
        """Of matrices that are in FP8."""
        if parts[0].dtype is not E4M3:
            return ()
        if self._fp8 is None:
            raise Invalid(
                f"{self.path}: {names[0]} is in FP8, and config.json has no quantization_config "
                "that says how"
            )
        return [
            self._scales_of(name, part, self._fp8) for name, part in zip(names, parts, strict=True)
        ]

    def _scales_of(self, name: str, part: torch.Tensor, fp8: Fp8Format) -> StoredScales:
        """One for all, or one for each row, or one for each block."""
        wanted = [name + "_scale_inv", name + "_scale"]
        found = next((each for each in wanted if each in self._entries), None)
        if found is None:
            raise Invalid(f"{self.path}: no file has tensor {' or '.join(wanted)}")
        told = self._view(found, *self._shape(found))
        rows, ins = part.shape
        if told.numel() == 1:
            return StoredScales(told.view(1, 1).expand(rows, 1), 1, ins)
        if told.shape in ((rows,), (rows, 1)):
            return StoredScales(told.view(rows, 1), 1, ins)
        tall, group = fp8.block or (1, ins)
        if told.shape != (-(-rows // tall), -(-ins // group)):
            raise Invalid(
                f"{self.path}: {found} has shape {[*told.shape]}, which is not one for all, for "
                f"each row, or for each block of {tall} x {group} of {[rows, ins]}"
            )
        return StoredScales(told, tall, group)

    def _shape(self, name: str) -> Sequence[int]:
        shape: Sequence[int] = self._entries[name].told["shape"]
        return shape

    def place(self, stack: StoredTensor) -> tuple[Path, int]:
        """Where it begins, to read in the order of the files."""
        shard, start, _ = self._places[stack.parts[0].data_ptr()]
        return shard.path, start

    def _view(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._entries:
            raise Invalid(f"{self.path}: no file has tensor {name}")
        shard, entry = self._entries[name].shard, self._entries[name].told
        if tuple(entry["shape"]) != shape:
            raise Invalid(
                f"{shard.path}: {name} has shape {entry['shape']}, and must have {[*shape]}"
            )
        if entry["dtype"] not in _FORMATS:
            raise Invalid(
                f"{shard.path}: {name} has dtype {entry['dtype']}; supported are "
                f"{', '.join(sorted(_FORMATS))}"
            )
        dtype, (start, end) = _FORMATS[entry["dtype"]], entry["data_offsets"]
        if not 0 <= start <= end or end - start != prod(shape) * dtype.itemsize:
            raise Invalid(
                f"{shard.path}: {name} has bytes {start} to {end}, which is not what {[*shape]} of "
                f"{entry['dtype']} take"
            )
        first = shard.data_start + start
        view = torch.frombuffer(shard.map, dtype=dtype, count=prod(shape), offset=first)
        self._places[view.data_ptr()] = shard, first, end - start
        self._unused.add(view.data_ptr())
        self._total_bytes += end - start
        return view.view(shape)

    def _used(self, stack: StoredTensor) -> None:
        """Pages of the file that this process has mapped are not its own: but whoever looks at
        its memory would take them for that, and a limit on it might."""
        for part in (*stack.parts, *(scales.table for scales in stack.scales)):
            place = part.data_ptr()
            shard, start, size = self._places[place]
            if place in self._unused:
                self._unused.remove(place)
                self._done_bytes += size
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
            if length > 0:
                shard.map.madvise(mmap.MADV_DONTNEED, first, length)
        self._progress(self._done_bytes, self._total_bytes)


def _map(path: Path) -> mmap.mmap:
    """Privately, since torch has no tensors that can't be written to."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise Invalid(f"{path}: can't be mapped: {error}") from error
