"""The engine: scheduler, paged KV cache, models, sampling (docs/engine.md)."""
