"""Real clusters whose workers run vLLM. The tests run in Baton's Python environment; the workers
that they start run in vLLM's."""
