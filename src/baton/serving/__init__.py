"""Serving over HTTP: one engine instance behind OpenAI's API, and the router in front of instances."""
