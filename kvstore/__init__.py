"""The KV store node, which caches KV blocks in DRAM and on SSD: see ARCHITECTURE.md."""
