"""The prefill worker: see ARCHITECTURE.md, "A request's journey"."""
