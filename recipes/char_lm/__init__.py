"""A language model over real text: a complete project to copy (model, module, data, sample, how to run it)."""
