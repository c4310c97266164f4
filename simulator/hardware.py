"""The GPUs that can be simulated, with values from their datasheets."""

from dataclasses import dataclass

from baton.errors import Invalid

TERA = 10**12
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """``flops_per_second`` is the dense peak of BF16 matrix products with FP32 accumulation
    (datasheets print twice that, with sparsity). ``memory_bytes`` takes a datasheet's "GB" as GiB,
    which is what vendors mean; drivers report one or two percent less, since the GPU reserves some
    memory. ``dollars_per_hour`` is an assumption: a typical on-demand price per GPU at hourly
    clouds in 2025. ``matrix_efficiency`` is the assumed share of the peak that a prompt's matrix
    products reach, and ``memory_efficiency`` that of the bandwidth at which weights and KV are
    read. Both are higher on GeForce cards: with sums in FP32 their matrix units run at half of
    their speed, so that the rest of the chip keeps up, and GDDR is closer to its peak than HBM."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: int
    dollars_per_hour: float
    matrix_efficiency: float = 0.5
    memory_efficiency: float = 0.7


GEFORCE = (0.85, 0.9)
"""Matrix and memory efficiency."""

# Sources of all values except the prices, in this order: compute; memory.
_GPUS = (
    # NVIDIA H100 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS with sparsity; 3.35 TB/s, 80 GB.
    Gpu("H100", 989.5 * TERA, 3.35 * TERA, 80 * GIB, 2.99),
    # NVIDIA H200 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS with sparsity; 4.8 TB/s, 141 GB.
    Gpu("H200", 989.5 * TERA, 4.8 * TERA, 141 * GIB, 3.79),
    # NVIDIA Blackwell architecture technical brief, HGX B200: 2.25 PFLOPS dense; NVIDIA DGX B200
    # datasheet: 64 TB/s and 1,440 GB for eight.
    Gpu("B200", 2250 * TERA, 8 * TERA, 180 * GIB, 4.99),
    # NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM: 312 TFLOPS dense; 2,039 GB/s, 80 GB.
    Gpu("A100", 312 * TERA, 2.039 * TERA, 80 * GIB, 1.79),
    # NVIDIA L40S datasheet: 362.05 TFLOPS dense; 864 GB/s, 48 GB.
    Gpu("L40S", 362.05 * TERA, 0.864 * TERA, 48 * GIB, 0.89),
    # AMD Instinct MI300X data sheet: 1,307.4 TFLOPS dense; 5.3 TB/s, 192 GB.
    Gpu("MI300X", 1307.4 * TERA, 5.3 * TERA, 192 * GIB, 2.49),
    # NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090: 165.2 TFLOPS dense; 1,008 GB/s,
    # 24 GB.
    Gpu("RTX4090", 165.2 * TERA, 1.008 * TERA, 24 * GIB, 0.69, *GEFORCE),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, GeForce RTX 5090: 209.5 TFLOPS dense;
    # 1,792 GB/s, 32 GB.
    Gpu("RTX5090", 209.5 * TERA, 1.792 * TERA, 32 * GIB, 0.89, *GEFORCE),
)

GPUS = {gpu.name: gpu for gpu in _GPUS}


def get_gpu(name: str) -> Gpu:
    """Return the GPU with this name; case is ignored. Raises Invalid if the name is unknown."""
    gpu = GPUS.get(name.upper())
    if gpu is None:
        raise Invalid(f"unknown GPU {name!r}; known GPUs: {', '.join(GPUS)}", param="gpu")
    return gpu
