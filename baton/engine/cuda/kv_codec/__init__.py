"""Codecs of KV blocks in a GPU's memory, by Triton kernels (docs/kv-codecs.md).

They give the same bytes as those of :mod:`baton.kv_codec`, whose interface they implement.
"""
