"""Ranks of an instance together: their mesh and what they do as groups."""
