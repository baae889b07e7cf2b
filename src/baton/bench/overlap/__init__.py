"""`baton bench overlap`: how much of a hand-over is hidden behind the prefill that it follows, by policy."""
