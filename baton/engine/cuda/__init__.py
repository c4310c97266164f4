"""GPU code: attention, fused layer kernels, CUDA graphs of decode steps, sampling."""
