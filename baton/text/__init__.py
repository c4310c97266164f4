"""Tokenizer, chat templates, incremental detokenizing, stop strings, grammars. No torch."""
