"""Reads models in GGUF files (ggml's format, of llama.cpp) as if they were Hugging Face folders.

A file is described once by a small folder in the cache: config.json, the tokenizer, the chat
template, a list of the tensors, and a link to the file, which keeps the weights (:mod:`.folder`).
Everything else in Baton reads that folder. No module here imports torch.
"""
