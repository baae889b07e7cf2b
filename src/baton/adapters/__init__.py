"""Connectors that hand over the KV caches of other engines; each uses `baton.session` as any library user."""
