"""Engines without a model: they allocate, compute for a while, hand over, decode for a while, and free."""
