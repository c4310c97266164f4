"""``baton bench``: load on any server that speaks OpenAI's API, and what its users would see."""
