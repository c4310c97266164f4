"""The decoder in C++ for CPUs with AVX2 or AVX-512. Results have the same bits in any batch
(docs/engine.md)."""
