"""Federated learning: how data is divided among clients, who takes part in a round, and how results are joined."""
