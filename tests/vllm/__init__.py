"""Tests of the engine ``vllm``. The modules in this folder run in vLLM's Python environment. Those
in ``e2e`` run in Baton's environment, and start clusters whose workers run in vLLM's."""
