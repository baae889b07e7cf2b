"""Models: layers that know neither ranks nor pages."""
