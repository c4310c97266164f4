"""What prefill and decode workers share: jobs, the engine's thread, KV transfer, load reports."""
