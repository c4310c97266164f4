"""Compares Baton, with its own engine or in front of vLLM servers, to vLLM's own disaggregation and
to vLLM alone. Run it with ``python -m benchmarks.vllm``."""
