"""How rows attend once their keys and values are found, one way per file."""
