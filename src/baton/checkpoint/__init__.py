"""Checkpoints: a model's config and weights by the name that a user gives.

MODEL is a folder with config.json and safetensors, a GGUF file or a folder with one, `demo`, or
`dummy:CARD_OR_CONFIG` for random weights. Our engine loads them; adapters take their fingerprint.
"""
