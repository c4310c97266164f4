"""Parsers of tool calls and reasoning in models' answers, for the markup of each model family."""
