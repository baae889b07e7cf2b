"""What the transports share: regions and grants, tickets, span copies, threads and the handshake."""
