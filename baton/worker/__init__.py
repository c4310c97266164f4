"""The worker, for prefill and decode: jobs, the engine's thread, KV transfer, load reports."""
