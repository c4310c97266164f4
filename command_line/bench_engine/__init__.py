"""``baton bench engine``: the engine alone on this machine, compared with its roofline."""
