"""Projects that nobody thought of, drawn from a grammar of what a project can combine."""
