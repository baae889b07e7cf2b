"""Gives each request to a pair of instances, and follows it until the client has the whole answer."""

# Values that are made for every request are structs and not dataclasses: a frozen one costs a sixth so.
