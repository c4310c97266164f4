"""Operating-system facilities: the heap, memory files."""
