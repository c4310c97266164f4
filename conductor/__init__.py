"""The conductor: see ARCHITECTURE.md, "A request's journey"."""
