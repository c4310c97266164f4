"""The nouns that all rooms share: ids, requests, block keys, members. Standard library only."""
