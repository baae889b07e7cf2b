"""When bytes travel and what a failure means: state machines and messages. Pure, without clock or socket."""
