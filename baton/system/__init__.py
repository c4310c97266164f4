"""The process and its machine: heap, memory files."""
