"""Kills and freezes unmodified ``vllm serve`` processes behind attached workers, and compares all
answers with those of one server. A tool, not a part of ``make test-vllm``."""
