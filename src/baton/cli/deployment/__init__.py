"""What `baton up` and `baton demo` start: a registry, instances and a router, as children of one process."""
