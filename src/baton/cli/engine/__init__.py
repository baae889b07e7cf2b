"""The verbs that start the engine; their options are in baton.cli, which loads fast."""
