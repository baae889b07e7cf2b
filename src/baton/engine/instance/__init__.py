"""An instance: its rank processes, the scheduler over them, and what a caller holds."""
