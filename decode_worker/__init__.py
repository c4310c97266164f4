"""The decode worker: see ARCHITECTURE.md, "A request's journey"."""
