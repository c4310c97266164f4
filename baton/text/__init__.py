"""Tokenizer, chat templates, incremental detokenization, stop strings, grammars. No torch."""
