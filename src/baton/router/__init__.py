"""Gives each request to a pair of instances, and follows it until the client has the whole answer."""
