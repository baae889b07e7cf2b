"""Finds stop strings in text that comes in pieces.

Each stop string is a small automaton (Knuth, Morris and Pratt): its state is how many of its first characters
the text ends with. The largest state is how much text has to be held back, and the first character that
completes a stop string ends the text; where it completes several the longest counts. So neither depends on
how the text was cut into pieces, and the work is linear in the text.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Automaton:
    """One stop string and how much of it the text ends with."""

    __slots__ = ("_fallback", "_text", "state")

    def __init__(self, text: str) -> None:
        self._text = text
        self._fallback = [0] * len(text)
        self.state = 0
        for place in range(1, len(text)):
            self._fallback[place] = self._next(self._fallback[place - 1], text[place])

    @property
    def is_complete(self) -> bool:
        return self.state == len(self._text)

    def step(self, character: str) -> None:
        self.state = self._next(self.state, character)

    def _next(self, state: int, character: str) -> int:
        while state and self._text[state] != character:
            state = self._fallback[state - 1]
        return state + (self._text[state] == character)


class StopStrings:
    """Passes text on up to the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.is_found = False

    def push(self, piece: str) -> str:
        """The text that is certain not to belong to a stop string; nothing once one was found."""
        if self.is_found:
            return ""
        if not self._automata:
            return piece
        text = self._held + piece
        for place, character in enumerate(piece, start=len(self._held)):
            for automaton in self._automata:
                automaton.step(character)
            completed = [automaton.state for automaton in self._automata if automaton.is_complete]
            if completed:
                self.is_found = True
                self._held = ""
                return text[: place + 1 - max(completed)]
        num_certain = len(text) - max(automaton.state for automaton in self._automata)
        self._held = text[num_certain:]
        return text[:num_certain]

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held
