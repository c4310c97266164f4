"""Tests of the engine ``vllm``. Those beside this file run in vLLM's environment; those in ``e2e``
run in Baton's own, and start clusters whose workers run in vLLM's."""
