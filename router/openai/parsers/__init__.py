"""Parsers of tool calls and reasoning in the answers of models, for each family's markup."""
