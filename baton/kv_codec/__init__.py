"""Codecs of KV blocks: they make blocks smaller for a link or a storage tier (docs/kv-codecs.md).

- :class:`~baton.kv_codec.base.BlockCodec` is the interface.
- :class:`~baton.kv_codec.block_format.BlockFormat` says how a block's bytes are arranged.

Nothing here imports torch, so that store nodes stay small.
"""
