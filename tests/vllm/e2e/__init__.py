"""Real clusters whose workers run vLLM. The tests run in Baton's own environment."""
