"""Handwritten digits: a complete project to copy (module, data, how to run it)."""
