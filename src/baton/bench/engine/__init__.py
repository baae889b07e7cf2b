"""`baton bench engine`: the engine against `transformers` on the same checkpoint, threads and dtype."""
