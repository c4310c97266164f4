"""The conductor, which places requests on workers and plans pool sizes: see ARCHITECTURE.md."""
