"""Tests with vLLM. The modules in this folder run in vLLM's Python environment. Those in ``e2e``
and ``chaos`` run in Baton's, and start servers that run in vLLM's."""
