"""Communication: process groups, collectives as data, their proof and their execution.

Nothing is imported here, so that what describes, proves, plays and costs collectives stays free of torch.
"""
