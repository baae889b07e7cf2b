"""What the transports are made of: buffers, spans, copies, tickets, grants and proofs."""
