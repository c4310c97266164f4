"""Paged attention: its interface (``base``), and a backend for each kind of device."""
