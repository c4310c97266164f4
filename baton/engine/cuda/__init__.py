"""GPU code other than attention: fused layer kernels, CUDA graphs of decode steps, sampling."""
