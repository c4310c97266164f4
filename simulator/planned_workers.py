"""The uses of a number of GPUs that ``baton plan`` compares: how many workers of each kind, and how
the GPUs of a worker share the model."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from simulator.hardware import get_gpu
from simulator.model_shapes import get_model_shape
from simulator.parallelism import ONE_GPU, POOLS, Parallelism, PoolParallelism
from simulator.roofline import fits
from simulator.simulated_hardware import SimulatedHardware
from simulator.step_cost import WorkerCosts

WORKER_SIZES = (1, 2, 4, 8)
"""The numbers of GPUs per worker that are tried, up to those of a host."""

MAX_SPLITS = 96
"""The maximum number of splits that are simulated before the best is refined, if there are several
sizes of workers. It is limited because each takes a simulation."""

MIN_SPLITS_PER_SIZES = 3

PREFILL_TOKENS, BATCH, CONTEXT_TOKENS = 4096, 64, 2048
"""The step of prompts, and the batch of answers with their contexts, by which ways to share a model
between the same number of GPUs are compared."""


class Workers(NamedTuple):
    """The numbers of workers of a cluster, and their parallelism."""

    prefill: int
    decode: int
    mixed: int = 0
    parallelism: PoolParallelism = PoolParallelism()

    @property
    def kind(self) -> str:
        if not self.mixed:
            return "split"
        return "hybrid" if self.prefill else "mixed"

    @property
    def num_gpus(self) -> int:
        sizes = (size.num_gpus for size in self.parallelism)
        return sum(map(operator.mul, self.counts.values(), sizes))

    @property
    def has_parallelism(self) -> bool:
        """Whether a worker has several GPUs."""
        return self.num_gpus > sum(self.counts.values())

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of workers by pool."""
        return dict(zip(POOLS, (self.prefill, self.decode, self.mixed), strict=True))

    def as_dict(self) -> dict[str, object]:
        """Return the numbers of workers and their sizes; a size is None if there is no such
        worker."""
        sizes: dict[str, object] = {}
        for (pool, count), size in zip(self.counts.items(), self.parallelism, strict=True):
            sizes[f"{pool}_tp"] = size.tensor if count else None
            sizes[f"{pool}_ep"] = size.expert if count else None
        return {**self.counts, **sizes}

    def pool_texts(self, *, with_sizes: bool) -> list[str]:
        """Return a text like ``2×TP4`` for the prefill, the decode and the mixed workers. It is
        only the number if ``with_sizes`` is false, or if there are no such workers."""
        return [
            f"{count}×{str(size).replace(' ', '')}" if with_sizes and count else str(count)
            for count, size in zip(self.counts.values(), self.parallelism, strict=True)
        ]

    def __str__(self) -> str:
        prefill, decode, mixed = self.pool_texts(with_sizes=self.has_parallelism)
        parts = (self.prefill and f"{prefill}+{decode}", self.mixed and f"{mixed} mixed")
        return " and ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """The ways in which the workers of each pool may share the model, by number of GPUs."""

    prefill: tuple[Parallelism, ...]
    decode: tuple[Parallelism, ...]
    mixed: tuple[Parallelism, ...]

    @classmethod
    def of(cls, hardware: SimulatedHardware, num_gpus: int) -> "SizeOptions":
        """Return the sizes that the options name. For a pool without any, return the numbers of
        GPUs whose memory suffices, each with the fastest way to share the model."""
        given = hardware.parallelism

        def of_pool(pool: str, seconds: Callable[[WorkerCosts], float]) -> tuple[Parallelism, ...]:
            flags = (getattr(hardware, f"{pool}_tp"), getattr(hardware, f"{pool}_ep"))
            if hardware.fixes_gpus_per_worker or flags != (None, None):
                return (getattr(given, pool),)
            return _fitting_sizes(hardware, num_gpus, seconds) or (getattr(given, pool),)

        return cls(
            of_pool("prefill", lambda costs: costs.prefill.seconds(PREFILL_TOKENS)),
            of_pool("decode", _decode_seconds),
            of_pool("mixed", _decode_seconds),
        )

    @property
    def smallest(self) -> Parallelism:
        """The smallest worker that computes prompts."""
        return min((*self.prefill, *self.mixed), key=lambda size: size.num_gpus)

    def mixed_workers(self, num_gpus: int) -> Iterator[Workers]:
        """Yield mixed workers of each size, on all GPUs."""
        for size in self.mixed:
            if count := num_gpus // size.num_gpus:
                yield Workers(0, 0, count, PoolParallelism(mixed=size))

    def splits(self, num_gpus: int) -> list[list[Workers]]:
        """Return, for each pair of sizes, all splits to which no further worker can be added,
        fewest prefill workers first."""
        pairs = product(self.prefill, self.decode)
        found = [_splits(num_gpus, prefill, decode) for prefill, decode in pairs]
        return [splits for splits in found if splits]


def first_splits(splits: Sequence[Sequence[Workers]]) -> list[Workers]:
    """Return the splits to simulate first: all, if there is one pair of sizes, otherwise at most
    about :data:`MAX_SPLITS`, evenly spread."""
    if len(splits) == 1:
        return list(splits[0])
    each = max(MAX_SPLITS // max(len(splits), 1), MIN_SPLITS_PER_SIZES)
    return [split for of_sizes in splits for split in _evenly(of_sizes, each)]


def between(
    splits: Sequence[Sequence[Workers]], simulated: set[Workers], best: Workers
) -> list[Workers]:
    """Return the splits in the middle between ``best`` and its nearest ``simulated`` neighbours of
    the same sizes; none if there is no other between them."""
    of_sizes = next(each for each in splits if best in each)
    place = of_sizes.index(best)
    found = []
    for direction in (-1, 1):
        gap = 1
        while 0 <= place + direction * gap < len(of_sizes):
            if of_sizes[place + direction * gap] in simulated:
                break
            gap += 1
        if gap > 1:
            found.append(of_sizes[place + direction * (gap // 2)])
    return found


def hybrids(split: Workers, mixed: Workers, num_gpus: int) -> Iterator[Workers]:
    """Yield hybrids in which mixed workers like those of ``mixed`` have a quarter, a half and three
    quarters of the GPUs. The others have the proportions of ``split``."""
    sizes = split.parallelism._replace(mixed=mixed.parallelism.mixed)
    prefill_gpus, decode_gpus = sizes.prefill.num_gpus, sizes.decode.num_gpus
    for quarter in (1, 2, 3):
        num_mixed = num_gpus * quarter // 4 // sizes.mixed.num_gpus
        rest = num_gpus - num_mixed * sizes.mixed.num_gpus
        most = (rest - decode_gpus) // prefill_gpus
        if num_mixed and most >= 1:
            share = round(rest * split.prefill / num_gpus)
            prefill = min(max(share, 1), most)
            decode = (rest - prefill * prefill_gpus) // decode_gpus
            yield Workers(prefill, decode, num_mixed, sizes)


def _fitting_sizes(
    hardware: SimulatedHardware, num_gpus: int, seconds: Callable[[WorkerCosts], float]
) -> tuple[Parallelism, ...]:
    gpu, shape = get_gpu(hardware.gpu), get_model_shape(hardware.model)
    found = []
    for size in WORKER_SIZES:
        ways = [Parallelism(size)]
        if shape.experts is not None and size > 1:
            ways += [Parallelism(1, size), Parallelism(size, size)]
        fitting = [way for way in ways if size <= num_gpus and fits(gpu, shape, way)]
        if fitting:
            found.append(min(fitting, key=lambda way: seconds(hardware.worker_costs(way))))
    return tuple(found)


def _decode_seconds(costs: WorkerCosts) -> float:
    return costs.decode.seconds(BATCH, BATCH * CONTEXT_TOKENS)


def _splits(num_gpus: int, prefill: Parallelism, decode: Parallelism) -> list[Workers]:
    """Return the splits in which neither pool could have another worker."""
    sizes = PoolParallelism(prefill, decode, ONE_GPU)
    found = []
    for num_prefill in range(1, (num_gpus - decode.num_gpus) // prefill.num_gpus + 1):
        num_decode = (num_gpus - num_prefill * prefill.num_gpus) // decode.num_gpus
        if num_gpus - num_prefill * prefill.num_gpus - num_decode * decode.num_gpus < (
            prefill.num_gpus
        ):
            found.append(Workers(num_prefill, num_decode, 0, sizes))
    return found


def _evenly(items: Sequence[Workers], count: int) -> list[Workers]:
    """Return ``count`` of the items, or all if they are fewer: the first, the last, and others in
    equal distances."""
    if len(items) <= count:
        return list(items)
    places = [round(number * (len(items) - 1) / (count - 1)) for number in range(count)]
    return [items[place] for place in places]
