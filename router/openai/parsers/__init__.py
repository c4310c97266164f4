"""Parsers of tool calls and reasoning in the answers of models, for the markup of each model
family."""
