"""Compares several systems: Baton with vLLM as its engine, Baton with its own engine, vLLM's own
disaggregation, and vLLM alone. Run it with ``python -m benchmarks.vllm``."""
