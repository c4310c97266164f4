"""Reads and validates LoRA adapters in the format of the library ``peft``: a folder with
adapter_config.json and adapter_model.safetensors.

This module doesn't import torch, because the router reads adapters, too.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Event
from time import thread_time
from typing import Any, NoReturn

from baton.checkpoints.checkpoint import ModelConfig
from baton.checkpoints.quick_pattern import is_quick_to_match
from baton.core.adapter import ADAPTER_DIGEST_BYTES
from baton.errors import Invalid

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Limit for a weights file's header, which has about 150 bytes per tensor."""

MAX_ALPHA = 1_000_000

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""The dtypes that weights may have, and the size of a number in bytes."""

MAX_MATCHING_SECONDS = 1.0
"""CPU time within which all names and regular expressions in adapter_config.json must have been
matched. A rank and an alpha for each module of a model with 560 modules take 0.4 s."""

MATCHING_SLICE_SECONDS, MATCHING_PAUSE_SECONDS = 0.001, 0.004
"""After each slice of CPU time, matching pauses, because it would delay the other threads of a
process that serves: each would wait for the interpreter several times per step."""

_READ = """
    alpha_pattern bias exclude_modules init_lora_weights layers_pattern layers_to_transform
    lora_alpha peft_type r rank_pattern target_modules use_rslora
"""
_IGNORED = """
    auto_mapping base_model_name_or_path ensure_weight_tying eva_config inference_mode lora_dropout
    megatron_core peft_version qalora_group_size revision runtime_config task_type
"""
_KNOWN_OPTIONS = frozenset((_READ + _IGNORED).split())
"""Options of adapter_config.json that are read, and those that do not change what an adapter
computes. Any other option must be unset."""

_PLAIN_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that don't change the base model's weights. Others, such as PiSSA, do, so such an
adapter belongs to another base model."""

_TENSOR = re.compile(
    r"base_model\.model\.(model\.layers\.(\d{1,6})\.(self_attn|mlp)\.(\w+))\.lora_([AB])\.weight"
)


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A linear layer of the base model that an adapter may change. ``name`` is its name in the
    checkpoint, as in ``model.layers.0.self_attn.q_proj``; its weight is [outs, ins]."""

    name: str
    layer: int
    projection: str
    outs: int
    ins: int


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix of the weights file: ``data[start:end]`` has its numbers in ``dtype``."""

    dtype: str
    shape: tuple[int, int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredPair:
    """The two matrices of one module's adapter: ``a`` is [rank, ins], ``b`` is [outs, rank]. The
    module's output for ``x`` becomes ``x W^T + scaling * x A^T B^T``."""

    module: TargetModule
    a: StoredMatrix
    b: StoredMatrix
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter whose files were read and checked. ``data`` is the content of the weights
    file."""

    path: Path
    digest: bytes
    pairs: tuple[StoredPair, ...]
    data: bytes

    @property
    def max_rank(self) -> int:
        return max(pair.rank for pair in self.pairs)


def read_adapter(path: Path, model: ModelConfig, max_rank: int) -> StoredAdapter:
    """Read the adapter in the folder ``path`` for the base model ``model``.

    Raises Invalid, naming the file and the reason, if a file is missing, damaged or larger than an
    adapter of rank ``max_rank`` can be, if the adapter does not fit the model, or if it needs a
    feature that is not supported.
    """
    modules = {module.name: module for module in target_modules(model)}
    config_bytes = _read_bounded(path / CONFIG_FILE, MAX_CONFIG_BYTES)
    config = _AdapterConfig(path / CONFIG_FILE, config_bytes)
    weights_path = path / WEIGHTS_FILE
    data = _read_bounded(weights_path, _max_weights_bytes(modules.values(), max_rank))
    matrices = _matrices(weights_path, data, modules)
    wanted = config.targeted(modules)
    _require_same(weights_path, set(matrices), wanted)
    pairs = [
        _pair(weights_path, modules[name], matrices[name], config, max_rank)
        for name in modules
        if name in matrices
    ]
    return StoredAdapter(path, _digest(config_bytes, data), tuple(pairs), data)


def adapter_digest(path: Path, model: ModelConfig, max_rank: int) -> bytes:
    """Return the digest of an adapter's configuration and weights. Raises the errors of
    :func:`read_adapter`."""
    return read_adapter(path, model, max_rank).digest


def target_modules(model: ModelConfig) -> list[TargetModule]:
    """Return the base model's modules that an adapter may change, in order: the projections of
    attention and of dense MLPs. Experts, embeddings and the head are not among them."""
    hidden, size = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    mlp = {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
    modules = []
    for layer in range(model.num_layers):
        has_experts = model.moe is not None and layer in model.moe.layers
        for part, shapes in (("self_attn", attention), ("mlp", {} if has_experts else mlp)):
            for projection, shape in shapes.items():
                name = f"model.layers.{layer}.{part}.{projection}"
                modules.append(TargetModule(name, layer, projection, *shape))
    return modules


def _digest(config: bytes, data: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=ADAPTER_DIGEST_BYTES, person=b"baton.lora.v1")
    digest.update(len(config).to_bytes(8, "little"))
    digest.update(config)
    digest.update(data)
    return digest.digest()


def _read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file, so that later changes of the file don't matter."""
    try:
        if not path.is_file():  # opening a FIFO would block
            raise Invalid(f"{path}: the file is missing")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= max_bytes:
                return file.read(size)
    except OSError as error:
        raise Invalid(f"{error.strerror}: {path}") from error
    raise Invalid(
        f"{path}: the file is larger than {max_bytes} bytes, the maximum for this model "
        "(see max_lora_rank)"
    )


def _max_weights_bytes(modules: Iterable[TargetModule], max_rank: int) -> int:
    """Return the maximum size of a weights file: the header, and all matrices in FP32."""
    return MAX_HEADER_BYTES + 4 * max_rank * sum(each.ins + each.outs for each in modules)


def _matrices(
    path: Path, data: bytes, modules: Mapping[str, TargetModule]
) -> dict[str, dict[str, StoredMatrix]]:
    """Return the matrices of a weights file by the module's name, and by "A" and "B". Raises
    Invalid if the file is damaged or has a tensor of any other kind."""
    header, data_start = _header(path, data)
    matrices: dict[str, dict[str, StoredMatrix]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        found = _TENSOR.fullmatch(name)
        if found is None or found[1] not in modules:
            raise Invalid(f"{path}: tensor {name[:200]} {_why_unsupported(name)}")
        matrix = _matrix(path, name, entry, data_start, len(data))
        matrices.setdefault(found[1], {})[found[5]] = matrix
    if not matrices:
        raise Invalid(f"{path}: the file has no tensors")
    return matrices


def _why_unsupported(name: str) -> str:
    for part, reason in _UNSUPPORTED_TENSORS.items():
        if part in name:
            return f"is not supported: {reason}"
    return "does not belong to a projection of this model's layers"


_UNSUPPORTED_TENSORS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding": "adapters of embeddings",
    "embed_tokens": "adapters of embeddings",
    "lm_head": "adapters of the head",
    "experts": "adapters of experts",
    "modules_to_save": "modules_to_save",
    "bias": "biases",
}


def _header(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file and the offset of its data."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(len(data) - 8, MAX_HEADER_BYTES):
        raise Invalid(f"{path}: the file is not in safetensors format, or is truncated")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{path}: invalid safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise Invalid(f"{path}: invalid safetensors header: it is not an object")
    return header, 8 + length


def _matrix(path: Path, name: str, entry: Any, data_start: int, size: int) -> StoredMatrix:
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        start, end = (data_start + offset for offset in entry["data_offsets"])
        is_valid = (
            len(shape) == 2
            and all(type(each) is int and each >= 1 for each in (*shape, start, end))
            and data_start <= start <= end <= size
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Invalid(f"{path}: the header's entry of {name} is invalid") from error
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        raise Invalid(f"{path}: {name} has dtype {dtype!r}; supported dtypes: {known}")
    if not is_valid or end - start != prod(shape) * ITEM_BYTES[dtype]:
        raise Invalid(
            f"{path}: {name} has shape {shape} in {dtype} at {entry['data_offsets']}, which is not "
            f"a matrix in a file of {size} bytes"
        )
    return StoredMatrix(dtype, (shape[0], shape[1]), start, end)


def _require_same(path: Path, found: set[str], wanted: set[str]) -> None:
    """Raise Invalid unless the file has the weights of exactly the modules that are targeted."""
    if missing := sorted(wanted - found):
        raise Invalid(f"{path}: {missing[0]} is targeted, but the file has no weights for it")
    if extra := sorted(found - wanted):
        raise Invalid(
            f"{path}: the file has weights for {extra[0]}, which {CONFIG_FILE} does not target"
        )


def _pair(
    path: Path,
    module: TargetModule,
    matrices: Mapping[str, StoredMatrix],
    config: "_AdapterConfig",
    max_rank: int,
) -> StoredPair:
    if len(matrices) < 2:
        raise Invalid(f"{path}: {module.name} must have both lora_A and lora_B")
    a, b = matrices["A"], matrices["B"]
    rank = config.rank(module.name)
    if rank > max_rank:
        raise Invalid(
            f"{path}: {module.name} has rank {rank}; max_lora_rank is {max_rank}",
            param="max_lora_rank",
        )
    if a.shape != (rank, module.ins) or b.shape != (module.outs, rank):
        raise Invalid(
            f"{path}: {module.name} has lora_A {[*a.shape]} and lora_B {[*b.shape]}; for rank "
            f"{rank} and this model they must be {[rank, module.ins]} and {[module.outs, rank]}"
        )
    return StoredPair(module, a, b, config.scaling(module.name))


class _AdapterConfig:
    """An adapter_config.json. Raises Invalid if it is not that of a LoRA adapter, or asks for
    anything that is not supported."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path = path
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Invalid(f"{path}: {error}") from error
        if not isinstance(values, dict):
            raise Invalid(f"{path}: the file is not a JSON object")
        self._values = values
        self._stop_at = thread_time() + MAX_MATCHING_SECONDS
        self._pause_at = thread_time() + MATCHING_SLICE_SECONDS
        self._reject_unsupported()
        self._rank_pattern = self._pattern("rank_pattern")
        self._alpha_pattern = self._pattern("alpha_pattern")

    def targeted(self, modules: Mapping[str, TargetModule]) -> set[str]:
        """Return the names of the modules that the configuration targets."""
        layers = self._layers()
        excluded = self._matching("exclude_modules", modules)
        return {
            name
            for name in self._matching("target_modules", modules) - excluded
            if layers is None or modules[name].layer in layers
        }

    def rank(self, module: str) -> int:
        rank = self._lookup("rank_pattern", self._rank_pattern, module, self._values.get("r"))
        if type(rank) is not int or rank < 1:
            self._fail("r", rank, "ranks must be positive integers")
        return int(rank)

    def scaling(self, module: str) -> float:
        """Return the factor of a module's addition: alpha / rank or, with rank-stabilized LoRA
        (Kalajdzievski 2023), alpha / sqrt(rank)."""
        default = self._values.get("lora_alpha")
        alpha = self._lookup("alpha_pattern", self._alpha_pattern, module, default)
        if type(alpha) not in (int, float) or not abs(alpha) <= MAX_ALPHA:
            self._fail("lora_alpha", alpha, f"it must be a number up to {MAX_ALPHA}")
        rank = self.rank(module)
        return float(alpha) / (math.sqrt(rank) if self._values.get("use_rslora") else rank)

    def _reject_unsupported(self) -> None:
        values = self._values
        if values.get("peft_type") != "LORA":
            self._fail("peft_type", values.get("peft_type"), "only LORA is supported")
        if values.get("bias", "none") != "none":
            self._fail("bias", values["bias"], "only none is supported")
        initialization = values.get("init_lora_weights")
        if initialization not in _PLAIN_INITIALIZATIONS:
            self._fail(
                "init_lora_weights",
                initialization,
                "it changes the base model's weights, which is not supported; convert the "
                "adapter with peft first",
            )
        for key, value in values.items():
            if value and key not in _KNOWN_OPTIONS:
                self._fail(key[:100], value, "this option of peft is not supported")

    def _layers(self) -> set[int] | None:
        """Return the indexes of the targeted layers; None if all are targeted."""
        layers = self._values.get("layers_to_transform")
        if layers is None:
            return None
        layers = [layers] if type(layers) is int else layers
        if not isinstance(layers, list) or not all(type(each) is int for each in layers):
            self._fail("layers_to_transform", layers, "it must be an integer or a list of them")
        pattern = self._values.get("layers_pattern")
        if pattern not in (None, [], "layers", ["layers"]):
            self._fail("layers_pattern", pattern, "only layers is supported")
        return set(layers)

    def _matching(self, key: str, modules: Mapping[str, TargetModule]) -> set[str]:
        """Return the modules that match the list or regular expression under ``key``. Raises
        Invalid if a target matches none of this model's layers."""
        value = self._values.get(key)
        if value is None and key == "exclude_modules":
            return set()
        if isinstance(value, str):
            if value == "all-linear":
                return set(modules)
            pattern = self._compile(key, value)
            return {name for name in modules if self._in_time(key) and pattern.fullmatch(name)}
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self._fail(key, value, "it must be a list of names or a regular expression")
        found: set[str] = set()
        for target in value:
            self._in_time(key)
            matches = {name for name in modules if name == target or name.endswith("." + target)}
            if not matches and key == "target_modules":
                self._fail(key, target, "this model has no such projection that can be adapted")
            found |= matches
        return found

    def _pattern(self, key: str) -> list[tuple[re.Pattern[str], Any]]:
        """Return the entries of rank_pattern or alpha_pattern. As in peft, a key is a regular
        expression for the end of a module's name."""
        values = self._values.get(key) or {}
        if not isinstance(values, dict):
            self._fail(key, values, "it must be an object")
        return [
            (self._compile(key, each, prefix=r"(?:.*\.)?"), value)
            for each, value in values.items()
            if self._in_time(key)
        ]

    def _lookup(
        self, key: str, patterns: Sequence[tuple[re.Pattern[str], Any]], module: str, default: Any
    ) -> Any:
        """Return the value of the first pattern that matches the module's name."""
        for pattern, value in patterns:
            if self._in_time(key) and pattern.fullmatch(module):
                return value
        return default

    def _in_time(self, key: str) -> bool:
        """Raise Invalid if matching has taken too long. Otherwise return True, after a pause if it
        is time for one."""
        now = thread_time()
        if now >= self._pause_at:
            Event().wait(MATCHING_PAUSE_SECONDS)
            self._pause_at = now + MATCHING_SLICE_SECONDS
        if now >= self._stop_at:
            raise Invalid(
                f"{self._path}: {key} has too many patterns: matching them with the model's layers "
                f"takes more than {MAX_MATCHING_SECONDS:g} s"
            )
        return True

    def _compile(self, key: str, pattern: str, prefix: str = "") -> re.Pattern[str]:
        try:
            if not is_quick_to_match(pattern):
                self._fail(key, pattern, "the regular expression is too complex")
            return re.compile(f"{prefix}(?:{pattern})")
        except (re.error, RecursionError, OverflowError) as error:
            raise Invalid(f"{self._path}: {key} is {pattern[:200]!r}: {error}") from error

    def _fail(self, key: str, value: Any, reason: str) -> NoReturn:
        raise Invalid(f"{self._path}: {key} is {json.dumps(value)[:200]}; {reason}")
