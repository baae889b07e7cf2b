"""Language models as lists of layers; `families` has one file for each architecture."""
