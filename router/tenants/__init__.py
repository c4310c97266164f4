"""Authenticates tenants, admits their requests within their limits, and records their usage."""
