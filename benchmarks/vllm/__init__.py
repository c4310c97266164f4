"""Clusters of Baton with vLLM as the engine, beside vLLM's own disaggregation, vLLM alone, and
Baton's own engine: ``python -m benchmarks.vllm``."""
