"""Attention over paged pools, as one pass of a rank sees it."""
