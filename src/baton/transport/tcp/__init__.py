"""Plain TCP between any two machines."""

from baton.transport.tcp.transport import CONFIG, TRANSPORT

__all__ = ["CONFIG", "TRANSPORT"]
