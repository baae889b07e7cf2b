"""Measured claims: each command prints a table and writes JSON with machine and commit."""
