"""The KV store node: see ARCHITECTURE.md, "A block's journey"."""
