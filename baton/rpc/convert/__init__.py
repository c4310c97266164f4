"""Protobuf messages to core types and back."""
