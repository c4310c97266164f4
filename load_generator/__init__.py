"""``baton bench`` sends load to any server with OpenAI's API, and measures the latencies that users
see."""
