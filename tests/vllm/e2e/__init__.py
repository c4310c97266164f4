"""Tests of real clusters whose workers run vLLM. The tests run in Baton's Python environment, and
the workers that they start in vLLM's."""
