"""Deterministic simulation: the production drivers under a virtual clock and network, from one seed."""
