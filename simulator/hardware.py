"""The GPUs that can be simulated, with values from their datasheets."""

from dataclasses import dataclass

from baton.errors import Invalid
from simulator.gpu_link import NETWORK, PCIE_4, PCIE_5, PCIE_HOP_SECONDS, GpuLink, Topology, nvlink

TERA = 10**12
GIB = 1 << 30

GPUS_PER_HOST = 8
"""The maximum number of GPUs in a host. A larger group communicates over the network."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """``flops_per_second`` is the dense peak of BF16 matrix products with FP32 accumulation
    (datasheets print twice that, with sparsity). ``memory_bytes`` takes a datasheet's "GB" as GiB,
    which is what vendors mean; drivers report one or two percent less, since the GPU reserves some
    memory. ``dollars_per_hour`` is an assumption: a typical on-demand price per GPU at hourly
    clouds in 2025. ``matrix_efficiency`` is the assumed share of the peak that a prompt's matrix
    products reach, and ``memory_efficiency`` that of the bandwidth at which weights and KV are
    read. Both are higher on GeForce cards: with sums in FP32 their matrix units run at half of
    their speed, so that the rest of the chip keeps up, and GDDR is closer to its peak than HBM.
    ``link`` connects the GPUs of a host."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: int
    dollars_per_hour: float
    matrix_efficiency: float = 0.5
    memory_efficiency: float = 0.7
    link: GpuLink = PCIE_4

    def link_of_group(self, num_gpus: int) -> GpuLink:
        """Return the link over which a group of ``num_gpus`` GPUs communicates. If they are more
        than a host has, it is the network for all of them."""
        return self.link if num_gpus <= GPUS_PER_HOST else NETWORK


GEFORCE = (0.85, 0.9)
"""Matrix and memory efficiency."""

INFINITY_FABRIC = GpuLink("Infinity Fabric", Topology.MESH, 64e9, PCIE_HOP_SECONDS)

# Sources of all values except the prices, in this order: compute; memory; link.
_GPUS = (
    # NVIDIA H100 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS with sparsity; 3.35 TB/s, 80 GB;
    # NVLink 900 GB/s.
    Gpu("H100", 989.5 * TERA, 3.35 * TERA, 80 * GIB, 2.99, link=nvlink(900)),
    # NVIDIA H200 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS with sparsity; 4.8 TB/s, 141 GB;
    # NVLink 900 GB/s.
    Gpu("H200", 989.5 * TERA, 4.8 * TERA, 141 * GIB, 3.79, link=nvlink(900)),
    # NVIDIA Blackwell architecture technical brief, HGX B200: 2.25 PFLOPS dense; NVIDIA DGX B200
    # datasheet: 64 TB/s and 1,440 GB for eight, 14.4 TB/s of NVLink for eight.
    Gpu("B200", 2250 * TERA, 8 * TERA, 180 * GIB, 4.99, link=nvlink(1800)),
    # NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM: 312 TFLOPS dense; 2,039 GB/s, 80 GB;
    # NVLink 600 GB/s.
    Gpu("A100", 312 * TERA, 2.039 * TERA, 80 * GIB, 1.79, link=nvlink(600)),
    # NVIDIA L40S datasheet: 362.05 TFLOPS dense; 864 GB/s, 48 GB; PCIe Gen4 x16, no
    # NVLink.
    Gpu("L40S", 362.05 * TERA, 0.864 * TERA, 48 * GIB, 0.89, link=PCIE_4),
    # AMD Instinct MI300X data sheet: 1,307.4 TFLOPS dense; 5.3 TB/s, 192 GB; seven Infinity
    # Fabric links of 128 GB/s, the sum of both directions, one to each other GPU of a platform.
    Gpu("MI300X", 1307.4 * TERA, 5.3 * TERA, 192 * GIB, 2.49, link=INFINITY_FABRIC),
    # NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090: 165.2 TFLOPS dense; 1,008 GB/s,
    # 24 GB; PCIe Gen4 x16, no NVLink.
    Gpu("RTX4090", 165.2 * TERA, 1.008 * TERA, 24 * GIB, 0.69, *GEFORCE, PCIE_4),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, GeForce RTX 5090: 209.5 TFLOPS dense;
    # 1,792 GB/s, 32 GB; PCIe Gen5 x16, no NVLink.
    Gpu("RTX5090", 209.5 * TERA, 1.792 * TERA, 32 * GIB, 0.89, *GEFORCE, PCIE_5),
)

GPUS = {gpu.name: gpu for gpu in _GPUS}


def get_gpu(name: str) -> Gpu:
    """Return the GPU with this name; case is ignored. Raises Invalid if the name is unknown."""
    gpu = GPUS.get(name.upper())
    if gpu is None:
        raise Invalid(f"unknown GPU {name!r}; known GPUs: {', '.join(GPUS)}", param="gpu")
    return gpu
