"""Baton hands a request's cache from the instance that prefilled it to the one that decodes it."""

__version__ = "0.1.0"
