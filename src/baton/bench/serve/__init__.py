"""Load on an OpenAI endpoint, measured from the client's side."""
