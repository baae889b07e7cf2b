"""The reference engine: models as lists of layers, paged pools, a scheduler, parallel ranks, a sampler."""
