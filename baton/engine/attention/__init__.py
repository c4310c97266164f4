"""Paged attention behind one interface; see ``base``."""
