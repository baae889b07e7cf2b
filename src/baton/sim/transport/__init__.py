"""Copies in virtual time: the transport contract on numpy memory, with every failure that it allows."""
