"""The command ``baton bench kv-codec``: how small, how fast and how exact the codecs of KV blocks
are (docs/kv-codecs.md)."""
