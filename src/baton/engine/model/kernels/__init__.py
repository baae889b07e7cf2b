"""Recurrences as functions of tensors: a step for one token, the chunked parallel form for many."""
