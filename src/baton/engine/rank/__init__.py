"""One rank of an instance: a process that computes steps and hands their caches over."""
