"""Computes the costs of prefill and decode, from a GPU's datasheet or from a table of measurements.

In the roofline model (Williams et al., CACM 2009), the slower of computing and reading memory
determines the time. A prefill is compute-bound; a decode step is memory-bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.core.cost import DecodeCost, PrefillCost
from baton.errors import Invalid
from baton.json_fields import JsonFields, parse_fields
from simulator.hardware import GIB, Gpu
from simulator.model_shapes import ModelShape
from simulator.step_cost import StepCost

RESERVED_MEMORY_SHARE = 0.1
"""Share of the memory that is available for neither weights nor KV, but for activations, buffers
and the runtime."""

STEP_OVERHEAD_SECONDS = 0.5e-3
"""Time of a step that neither products nor attention take: sampling, small kernels, and what the
host does not hide. Baton's steps on an H100 and vLLM's on an RTX 4090 have about as much."""

MAX_COUNT = 1 << 50
"""Maximum of any count in a table."""


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Costs and KV capacity of one worker, which may have several GPUs."""

    prefill: PrefillCost
    decode: DecodeCost
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    step: StepCost


def roofline(
    gpu: Gpu,
    shape: ModelShape,
    num_gpus: int = 1,
    prefill_efficiency: float | None = None,
    decode_efficiency: float | None = None,
) -> WorkerCosts:
    """Compute the costs of a worker of ``num_gpus`` GPUs that share work and memory evenly;
    communication between them is assumed to take no time. ``prefill_efficiency`` is the share of
    peak FLOPS that matrix products reach, ``decode_efficiency`` the share of memory bandwidth that
    reads reach; if None, they are the GPU's.

    FP8 weights are assumed to compute at the speed of BF16. Raises Invalid for a model that does
    not fit, and for arguments out of range."""
    if prefill_efficiency is None:
        prefill_efficiency = gpu.matrix_efficiency
    if decode_efficiency is None:
        decode_efficiency = gpu.memory_efficiency
    _check(num_gpus, prefill_efficiency, decode_efficiency)
    flops = gpu.flops_per_second * num_gpus * prefill_efficiency
    bandwidth = gpu.bytes_per_second * num_gpus * decode_efficiency
    prefill = _prefill_cost(shape, flops, bandwidth)
    decode = _decode_cost(shape, flops, bandwidth)
    return WorkerCosts(
        prefill,
        decode,
        shape.kv_bytes_per_token,
        _kv_capacity_tokens(gpu, shape, num_gpus),
        _step_cost(prefill, decode),
    )


def _check(num_gpus: int, prefill_efficiency: float, decode_efficiency: float) -> None:
    if num_gpus < 1:
        raise Invalid(f"a worker has {num_gpus} GPUs; it must have at least one", param="num_gpus")
    shares = {"prefill_efficiency": prefill_efficiency, "decode_efficiency": decode_efficiency}
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise Invalid(f"{name} is {share}; it must be above 0 and at most 1", param=name)


def _prefill_cost(shape: ModelShape, flops: float, bandwidth: float) -> PrefillCost:
    """Return the cost of a prefill. A token takes two operations per active parameter. In each
    layer, attention takes ``prefill_pair_flops`` operations for each pair of a query token and a
    key token. The fixed part is the time to read the weights, including those of all experts, since
    a few hundred tokens select all experts. This cost is the sum of reading and computing. In
    reality, the two overlap, so the cost is too high: by up to a factor of two, but little for a
    long prompt."""
    return PrefillCost(
        fixed_seconds=_read_bytes(shape, shape.common_parameters + shape.expert_parameters)
        / bandwidth,
        per_token_seconds=2 * shape.active_parameters / flops,
        per_pair_seconds=shape.layers * shape.attention.prefill_pair_flops / flops,
    )


def _decode_cost(shape: ModelShape, flops: float, bandwidth: float) -> DecodeCost:
    """Return the cost of a decode step. A step reads the common weights once, the weights of the
    selected experts, and the KV of the context. Latent attention does so many operations per byte
    of KV that computing can take longer than reading."""
    pair_flops = shape.layers * shape.attention.decode_pair_flops
    return DecodeCost(
        fixed_seconds=_read_bytes(shape, shape.common_parameters) / bandwidth,
        per_request_seconds=2 * shape.active_parameters / flops,
        per_context_token_seconds=max(shape.kv_bytes_per_token / bandwidth, pair_flops / flops),
        expert_seconds=_read_bytes(shape, shape.expert_parameters) / bandwidth,
        num_experts=shape.experts.routed if shape.experts else 0,
        experts_per_token=shape.experts.per_token if shape.experts else 0,
    )


def _step_cost(prefill: PrefillCost, decode: DecodeCost) -> StepCost:
    """Return the cost of a step with prompts and answers. Its weights are read once, whatever it
    computes, and while it computes."""
    return StepCost(
        overhead_seconds=STEP_OVERHEAD_SECONDS,
        weights_seconds=decode.fixed_seconds,
        per_token_seconds=prefill.per_token_seconds,
        per_pair_seconds=prefill.per_pair_seconds,
        per_context_token_seconds=decode.per_context_token_seconds,
        expert_seconds=decode.expert_seconds,
        num_experts=decode.num_experts,
        experts_per_token=decode.experts_per_token,
    )


def _read_bytes(shape: ModelShape, num_parameters: int) -> float:
    return num_parameters * shape.bytes_per_weight


def _kv_capacity_tokens(gpu: Gpu, shape: ModelShape, num_gpus: int) -> int:
    usable = (1 - RESERVED_MEMORY_SHARE) * gpu.memory_bytes
    capacity = math.floor((usable * num_gpus - shape.weight_bytes) / shape.kv_bytes_per_token)
    if capacity >= 1:
        return capacity
    enough = math.ceil((shape.weight_bytes + shape.kv_bytes_per_token) / usable)
    raise Invalid(
        f"{shape.name} needs {shape.weight_bytes / GIB:.1f} GiB for its weights; {num_gpus} × "
        f"{gpu.name} has {gpu.memory_bytes * num_gpus / GIB:.0f} GiB, {RESERVED_MEMORY_SHARE:.0%} "
        f"of which is reserved. {enough} × {gpu.name} would be enough",
        param="gpu",
    )


def costs_from_table(path: Path) -> WorkerCosts:
    """Fit the costs to measurements. The file is a JSON object with ``prefill``, a list of
    ``{"new_tokens", "cached_tokens", "seconds"}``; ``decode``, a list of ``{"batch",
    "context_tokens", "seconds"}``, where ``context_tokens`` is the total over all requests;
    ``kv_bytes_per_token``; and ``kv_capacity_tokens``.

    Costs are not negative, and relative errors are minimized, so that short runs matter as much as
    long ones. Raises Invalid for a table that is not of this form, or that does not determine the
    costs."""
    table = parse_fields(_read_text(path), str(path))
    kv_bytes = table.integer("kv_bytes_per_token", 1, MAX_COUNT)
    capacity = table.integer("kv_capacity_tokens", 1, MAX_COUNT)
    prefill = PrefillCost(*_fit(table, "prefill", "new_tokens and cached_tokens", _prefill_terms))
    decode = DecodeCost(*_fit(table, "decode", "batch and context_tokens", _decode_terms))
    step = StepCost.from_measured(prefill, decode)
    return WorkerCosts(prefill, decode, kv_bytes, capacity, step)


_Terms = tuple[float, float, float]


def _prefill_terms(row: JsonFields) -> _Terms:
    """Return the factors by which PrefillCost's three parameters are multiplied in the time of a
    measured prefill: 1, the number of computed tokens, and the number of pairs of a query token and
    a key token."""
    new, cached = (
        row.integer("new_tokens", 1, MAX_COUNT),
        row.integer("cached_tokens", 0, MAX_COUNT),
    )
    return 1.0, new, new * (cached + new / 2)


def _decode_terms(row: JsonFields) -> _Terms:
    """Return the factors by which DecodeCost's first three parameters are multiplied in the time of
    a measured decode step: 1, the number of requests, and the total number of their context
    tokens."""
    return 1.0, row.integer("batch", 1, MAX_COUNT), row.integer("context_tokens", 0, MAX_COUNT)


def _fit(
    table: JsonFields, name: str, fields: str, terms: Callable[[JsonFields], _Terms]
) -> _Terms:
    """Fit a cost model's three parameters to the table's list of measurements ``name``. Raises
    Invalid if they do not determine the parameters; the message asks for small and large values of
    ``fields``."""
    rows = table.objects(name)
    seconds = np.array([row.positive("seconds") for row in rows])
    columns = np.array([terms(row) for row in rows]).reshape(-1, 3)
    scale = columns.max(axis=0, initial=1.0)
    if np.linalg.matrix_rank(columns / scale) < 3:
        raise Invalid(
            f"{table.where}: the {len(rows)} rows of {name} do not determine its three costs; "
            f"there must be at least three rows, with small and large values of {fields}"
        )
    costs = _least_squares(columns / scale / seconds[:, None]) / scale
    return float(costs[0]), float(costs[1]), float(costs[2])


def _least_squares(relative: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the non-negative vector x of length 3 for which ``relative @ x`` is closest to a
    vector of ones, which would mean no relative error. ``relative`` (``[num_rows, 3]``) has each
    row's terms, divided by its measured seconds. For each subset of the columns, the unconstrained
    problem is solved; the best of these solutions without a negative value is x."""
    best, best_error = np.zeros(3), math.inf
    for columns in (list(subset) for n in (3, 2, 1) for subset in combinations(range(3), n)):
        solution = np.linalg.lstsq(relative[:, columns], np.ones(len(relative)), rcond=None)[0]
        error = float(np.sum((relative[:, columns] @ solution - 1) ** 2))
        if (solution >= 0).all() and error < best_error:
            best, best_error = np.zeros(3), error
            best[columns] = solution
    return best


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Invalid(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Invalid(f"{path} is not UTF-8 text ({error.reason}); it must be JSON") from error
