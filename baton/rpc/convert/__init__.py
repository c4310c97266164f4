"""Conversion between protobuf messages and core types."""
