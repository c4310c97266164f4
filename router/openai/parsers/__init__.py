"""What models write beside text: calls of tools, and thoughts. Each family in its own markup."""
