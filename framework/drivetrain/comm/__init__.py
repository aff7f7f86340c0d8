"""Communication: process groups, collectives as data, their proof and their execution.

Nothing is imported here, so that ``schedule`` and ``check`` stay free of torch.
"""
