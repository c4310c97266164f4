"""Tests of clusters in front of real vLLM servers. The tests run in Baton's Python environment, and
the servers in vLLM's."""
