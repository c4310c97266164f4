"""Workers without a model: the same protocol at a set speed, hundreds in one process."""
