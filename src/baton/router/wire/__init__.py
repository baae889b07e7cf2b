"""HTTP/1.1 towards instances: connections that are kept, and answers that can be ended at once."""
