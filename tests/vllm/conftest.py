"""Configures vLLM as a worker does, before any test imports it."""

from baton.config.environment import set_vllm_environment

set_vllm_environment()
