"""Memory-mapped checkpoint files. Tensors are views of the files and are read only when they are
used."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from baton.checkpoints.checkpoint import Fp8Format, list_shards, read_shard_header
from baton.engine.quantization import E4M3, Int4Codes, QuantizedCodes
from baton.errors import Invalid

Progress = Callable[[int, int], None]
"""Called with the number of bytes loaded so far and the total number of bytes."""

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FORMATS = {**_FLOATS, "F8_E4M3": E4M3}
_BYTES = {"U8": torch.uint8}


@dataclass(frozen=True, slots=True)
class Shard:
    """A mapped safetensors file. ``map`` is private (copy on write) and never written to."""

    path: Path
    map: mmap.mmap
    data_start: int


@dataclass(frozen=True, slots=True)
class _Entry:
    shard: Shard
    fields: dict[str, Any]


class StoredTensor:
    """A tensor in the checkpoint's own format, which consists of ``parts`` stacked along the rows.

    ``shape`` is the shape of the whole tensor; in a tensor ``[num_experts, rows, ins]``, the
    experts' matrices are stacked, too. ``scales`` has one entry per part if the parts are in FP8,
    and is empty otherwise. Call :meth:`mark_used` after reading the tensor to count the progress
    and release the mapped pages."""

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
        self._parts = tuple(parts)
        self.shape = tuple(shape)
        self.scales = tuple(scales)
        self._on_used = on_used

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        return self._parts

    @property
    def int4_parts(self) -> Sequence[torch.Tensor | Int4Codes]:
        """The parts for a matrix in int4: as in ``parts``, or codes [rows, ins] that the checkpoint
        has already. Each part may be of another kind."""
        return self.parts

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def is_fp8(self) -> bool:
        return self.dtype is E4M3

    def split(self) -> list["StoredTensor"]:
        """Split a tensor ``[count, rows, ins]`` into ``count`` matrices [rows, ins]. Each matrix
        must consist of the same number of whole ``parts``."""
        count, rows, ins = self.shape
        num_parts = len(self.parts) // count
        assert num_parts * count == len(self.parts)
        return [
            StoredTensor(
                self.parts[n * num_parts : (n + 1) * num_parts],
                (rows, ins),
                self._on_used,
                self.scales[n * num_parts : (n + 1) * num_parts],
            )
            for n in range(count)
        ]

    def join(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the parts as one tensor. If there is nothing to convert or join, the result is a
        view of the mapped file, whose memory the processes of a host share."""
        assert not self.is_fp8, "FP8 codes are not weights"
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
        self.mark_used()
        return joined.view(self.shape)

    def load_codes(self, device: torch.device) -> QuantizedCodes:
        """Return the codes and scales of this tensor, which must be in FP8. All parts are stacked
        along the rows, even if they belong to different matrices."""
        parts = [
            scales.attach(part, device)
            for part, scales in zip(self.parts, self.scales, strict=True)
        ]
        codes = QuantizedCodes.join(parts)
        self.mark_used()
        return codes

    def mark_used(self) -> None:
        self._on_used(self)


@dataclass(frozen=True, slots=True)
class StoredScales:
    """A ``table`` [rows, groups] of scales in the checkpoint. Each scale applies to
    ``rows_per_scale`` by ``columns_per_scale`` codes, as in :class:`QuantizedCodes`."""

    table: torch.Tensor
    rows_per_scale: int
    columns_per_scale: int

    def attach(self, part: torch.Tensor, device: torch.device) -> QuantizedCodes:
        table = self.table.to(device, torch.float32)
        return QuantizedCodes(part.to(device), table, self.columns_per_scale, self.rows_per_scale)


class CheckpointShards:
    """All checkpoint files in the directory ``path``. Raises Invalid, with the names of the file
    and the tensor, if a tensor is missing or not as expected.

    ``fp8`` is the checkpoint's format of FP8 matrices, if it has any. ``progress`` is called with
    the number of bytes loaded so far, and the total size of the tensors requested so far.
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
            tensors, data_start = self._list_tensors(file)
            shard = Shard(file, _map(file), data_start)
            self._entries |= {name: _Entry(shard, entry) for name, entry in tensors.items()}

    def _list_tensors(self, file: Path) -> tuple[dict[str, Any], int]:
        """Return a description of each tensor in a file, and the offset of the data."""
        header, data_start = read_shard_header(file)
        return {name: each for name, each in header.items() if name != "__metadata__"}, data_start

    def check_all_read(self) -> None:
        """Raise Invalid if the file describes a model with more weights than were asked for. In
        safetensors, config.json describes the model, and other tensors are ignored."""

    def stack(self, names: Sequence[str], rows: Sequence[int], *rest: int) -> StoredTensor:
        """Return the tensors ``names``, stacked along their rows. The i-th tensor must have the
        shape [rows[i], *rest], and all must have the same dtype."""
        parts = [self._view(name, count, *rest) for name, count in zip(names, rows, strict=True)]
        formats = sorted({str(part.dtype) for part in parts})
        if len(formats) > 1:
            raise Invalid(f"{self.path}: {', '.join(names)} have different dtypes: {formats}")
        return StoredTensor(parts, (sum(rows), *rest), self._mark_used, self._scales(names, parts))

    def stack_experts(self, names: Sequence[Sequence[str]], rows: int, ins: int) -> StoredTensor:
        """Return the matrices of experts, [len(names), rows, ins]. The i-th matrix consists of the
        tensors ``names[i]``; all consist of the same number of tensors."""
        flat = [name for each in names for name in each]
        parts = [self._view(name, rows // len(each), ins) for each in names for name in each]
        if len({part.dtype for part in parts}) > 1:
            raise Invalid(
                f"{self.path}: {names[0][0]} and the tensors of other experts have different "
                "dtypes; all experts must have the same dtype"
            )
        return StoredTensor(
            parts, (len(names), rows, ins), self._mark_used, self._scales(flat, parts)
        )

    def has(self, name: str) -> bool:
        return name in self._entries

    def bytes_of(self, name: str, *shape: int) -> StoredTensor:
        """Return a tensor of bytes, whose format the caller knows."""
        return StoredTensor([self._view(name, *shape, formats=_BYTES)], shape, self._mark_used)

    def scalar(self, name: str, default: float) -> float:
        """Return the value of a tensor that has one element, or ``default`` if there is no such
        tensor."""
        if name not in self._entries:
            return default
        view = self._view(name, *self._shape(name))
        if view.numel() != 1 or not 0 < float(view) < float("inf"):
            raise Invalid(f"{self.path}: {name} is {view.tolist()}, and must be a positive number")
        self._mark_used(StoredTensor([view.view(1)], [1]))
        return float(view)

    def _scales(
        self, names: Sequence[str], parts: Sequence[torch.Tensor]
    ) -> Sequence[StoredScales]:
        """Return the scales of each part if the parts are in FP8, else an empty sequence. Raises
        Invalid if config.json does not describe the layout of the scales."""
        if parts[0].dtype is not E4M3:
            return ()
        if self._fp8 is None:
            raise Invalid(
                f"{self.path}: {names[0]} is in FP8, but config.json has no quantization_config "
                "that describes its scales' layout"
            )
        return [
            self._scales_of(name, part, self._fp8) for name, part in zip(names, parts, strict=True)
        ]

    def _scales_of(self, name: str, part: torch.Tensor, fp8: Fp8Format) -> StoredScales:
        """Return a matrix's scales: one for the whole matrix, or one per row, or one per block."""
        wanted = [name + "_scale_inv", name + "_scale"]
        found = next((each for each in wanted if each in self._entries), None)
        if found is None:
            raise Invalid(f"{self.path}: no file has tensor {' or '.join(wanted)}")
        scales = self._view(found, *self._shape(found))
        rows, ins = part.shape
        if scales.numel() == 1:
            return StoredScales(scales.view(1, 1).expand(rows, 1), 1, ins)
        if scales.shape in ((rows,), (rows, 1)):
            return StoredScales(scales.view(rows, 1), 1, ins)
        tall, group = fp8.block or (1, ins)
        if scales.shape != (-(-rows // tall), -(-ins // group)):
            raise Invalid(
                f"{self.path}: the scales {found} have shape {[*scales.shape]}; for a matrix "
                f"{[rows, ins]} they must have one element, one per row, or one per block of "
                f"{tall} x {group}"
            )
        return StoredScales(scales, tall, group)

    def _shape(self, name: str) -> Sequence[int]:
        shape: Sequence[int] = self._entries[name].fields["shape"]
        return shape

    def file_position(self, stack: StoredTensor) -> tuple[Path, int]:
        """Return the file and offset where a tensor begins, so that tensors can be read in file
        order."""
        shard, start, _ = self._places[stack.parts[0].data_ptr()]
        return shard.path, start

    def _view(
        self, name: str, *shape: int, formats: Mapping[str, torch.dtype] = _FORMATS
    ) -> torch.Tensor:
        shard, entry = self._entry(name, *shape)
        if entry["dtype"] not in formats:
            raise Invalid(
                f"{shard.path}: {name} has dtype {entry['dtype']}; supported dtypes: "
                f"{', '.join(sorted(formats))}"
            )
        dtype, (start, end) = formats[entry["dtype"]], entry["data_offsets"]
        if not 0 <= start <= end or end - start != prod(shape) * dtype.itemsize:
            raise Invalid(
                f"{shard.path}: tensor {name} takes bytes [{start}, {end}) = {end - start} bytes, "
                f"but its shape {[*shape]} in {entry['dtype']} needs "
                f"{prod(shape) * dtype.itemsize} bytes"
            )
        return self._map_tensor(shard, dtype, start, end - start).view(shape)

    def _entry(self, name: str, *shape: int) -> tuple[Shard, dict[str, Any]]:
        """Return the file that has a tensor, and its description there, which must have this
        shape."""
        if name not in self._entries:
            raise Invalid(f"{self.path}: no file has tensor {name}")
        shard, entry = self._entries[name].shard, self._entries[name].fields
        if tuple(entry["shape"]) != shape:
            raise Invalid(
                f"{shard.path}: {name} has shape {entry['shape']}, but must have shape {[*shape]}"
            )
        return shard, entry

    def _map_tensor(self, shard: Shard, dtype: torch.dtype, start: int, size: int) -> torch.Tensor:
        """Return ``size`` bytes of a file's data, from ``start`` on, as a view of the file."""
        first = shard.data_start + start
        view = torch.frombuffer(shard.map, dtype=dtype, count=size // dtype.itemsize, offset=first)
        self._places[view.data_ptr()] = shard, first, size
        self._unused.add(view.data_ptr())
        self._total_bytes += size
        return view

    def _mark_used(self, stack: StoredTensor) -> None:
        self._release((*stack.parts, *(scales.table for scales in stack.scales)))

    def _release(self, views: Sequence[torch.Tensor]) -> None:
        """Report the progress and unmap the pages that were read. They stay in the page cache; but
        while they are mapped, they are shown as this process's memory and may count towards its
        limit."""
        for part in views:
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
    """Map a file as private, writable memory, because torch has no read-only tensors."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise Invalid(f"{path} can't be mapped into memory: {error}") from error
