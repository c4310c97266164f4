"""Conversion between protobuf messages and types of ``baton.core``."""
