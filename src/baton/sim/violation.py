"""What a checker raises."""

from __future__ import annotations

from baton.errors import BatonError


class Violation(BatonError):  # noqa: N818 - it is what was found, not what went wrong here
    """A promise that was broken: in which seed, seen by which checker, and how."""

    def __init__(self, seed: int, checker: str, text: str) -> None:
        super().__init__(f"seed {seed}: {checker}: {text}")
        self.seed = seed
        self.checker = checker
        self.text = text

    def __reduce__(self) -> tuple[type[Violation], tuple[int, str, str]]:
        return Violation, (self.seed, self.checker, self.text)
