"""Folders of models and adapters as Hugging Face has them: their configuration, and the hub."""
