"""The decoder in C++, for CPUs with AVX-512: the same bits in any batch (docs/engine.md)."""
