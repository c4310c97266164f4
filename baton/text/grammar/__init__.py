"""Structured output: grammars are checked in helper processes, compiled, and enforced."""
