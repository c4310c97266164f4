"""Mock workers without a model: the same protocol at a configured speed, hundreds per process."""
