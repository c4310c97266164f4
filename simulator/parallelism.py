"""How the GPUs of a worker share a model."""

from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import Invalid
from simulator.model_shapes import ModelShape


@dataclass(frozen=True, slots=True, order=True)
class Parallelism:
    """The sizes of a worker's tensor and expert parallelism, in GPUs.

    ``tensor`` GPUs share the heads and matrices of each layer (Shoeybi et al., "Megatron-LM", 2019,
    section 3). If ``expert`` is 1, they share each routed expert in the same way. Otherwise
    ``expert`` GPUs have whole experts each, and tokens are sent to them and back (Lepikhin et al.,
    "GShard", 2020, section 3). The worker has the larger of both numbers of GPUs: if ``expert`` is
    larger, the other matrices and attention are replicated, and each of :attr:`num_replicas` groups
    computes its own requests (data-parallel attention, as in DeepSeek-V3, section 3.4)."""

    tensor: int = 1
    expert: int = 1

    @property
    def num_gpus(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def num_replicas(self) -> int:
        return self.num_gpus // self.tensor

    def check(self, shape: ModelShape) -> None:
        """Raise Invalid if these sizes don't divide the model's heads and experts."""
        self._check_tensor(shape)
        if self.expert == 1:
            return
        if shape.experts is None:
            raise Invalid(
                f"{shape.name} has no experts, so its expert-parallel size must be 1, not "
                f"{self.expert}"
            )
        if self.expert < 1 or self.expert % self.tensor or shape.experts.routed % self.expert:
            raise Invalid(
                f"an expert-parallel size of {self.expert} does not fit {shape.name}; it must be a "
                f"multiple of the tensor-parallel size ({self.tensor}) and divide the number of "
                f"routed experts ({shape.experts.routed})"
            )

    def _check_tensor(self, shape: ModelShape) -> None:
        heads, kv_heads = shape.attention.query_heads, shape.attention.kv_heads
        if self.tensor < 1 or heads % self.tensor:
            raise Invalid(
                f"a tensor-parallel size of {self.tensor} does not fit {shape.name}; it must be at "
                f"least 1 and divide the number of query heads ({heads})"
            )
        if kv_heads % self.tensor and self.tensor % kv_heads:
            raise Invalid(
                f"a tensor-parallel size of {self.tensor} does not fit {shape.name}; it must "
                f"divide the number of KV heads ({kv_heads}) or be a multiple of it"
            )

    def __str__(self) -> str:
        tensor = f"TP {self.tensor}"
        return tensor if self.expert == 1 else f"{tensor} EP {self.expert}"


ONE_GPU = Parallelism()


class PoolParallelism(NamedTuple):
    """The parallelism of the workers of each pool: of those that only compute prompts, that only
    write answers, and that serve whole requests."""

    prefill: Parallelism = ONE_GPU
    decode: Parallelism = ONE_GPU
    mixed: Parallelism = ONE_GPU


POOLS = PoolParallelism._fields
"""The pools of a simulated cluster. Workers of all kinds that do the same are in one."""
