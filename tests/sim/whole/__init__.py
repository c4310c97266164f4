"""A whole cluster in one process: production code over a network that can do its worst."""
