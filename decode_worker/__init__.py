"""The decode worker; its code is in ``baton.worker``. See ARCHITECTURE.md."""
