"""Compares Baton with vLLM as the engine, vLLM's own disaggregation, vLLM alone, and Baton with its
own engine: ``python -m benchmarks.vllm``."""
