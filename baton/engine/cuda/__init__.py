"""What computes on a GPU beside attention: fused layers, graphs of decode steps, sampling."""
