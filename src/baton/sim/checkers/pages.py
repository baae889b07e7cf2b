"""When all is settled every page is free again."""

from __future__ import annotations

from baton.sim.checkers.base import Checker


class Pages(Checker):
    """Counts; that no page is owned twice the pools themselves see to."""

    def over(self) -> None:
        """Everything is settled."""
        for name, instance in sorted(self.world.instances.items()):
            incarnation = instance.incarnation
            for rank, pool in sorted(incarnation.pools.items()) if incarnation else ():
                if owners := pool.owned():
                    self.fail(f"{name}/{rank} has lost pages of attempts {owners}")


CHECKER = Pages
