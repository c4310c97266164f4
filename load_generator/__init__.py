"""``baton bench``: load for any server with OpenAI's API, and the latencies that users see."""
