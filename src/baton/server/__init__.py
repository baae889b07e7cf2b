"""One instance behind HTTP: OpenAI's completions and chats, and what routers and people ask of a server."""
