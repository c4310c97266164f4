"""Tenants: authentication, quotas, admission, usage."""
