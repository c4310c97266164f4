"""Facilities of the operating system, each with a portable twin where only Linux has it."""
