"""Hand-overs between real processes: rank processes with numpy pools, a registry, and a paced producer."""
