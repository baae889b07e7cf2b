"""Mixers, over tokens: one module each, with a spec that the config gives and what it loads to."""
