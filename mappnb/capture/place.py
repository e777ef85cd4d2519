"""Which rank this process is, when that becomes known."""

from __future__ import annotations

import sys
import time

from mappnb.capture import launchinfo

__all__ = ["RankFinder"]

PATIENCE_S, TORCH_PATIENCE_S = 5.0, 30.0


class RankFinder:
    """Waits until the rank is known, or until it is certain enough that the program is alone.

    Parameters
    ----------
    told : (int, int), optional
        Rank and world size, if the program has said them.

    Attributes
    ----------
    automatic : bool
        Wait until the process trains: of the many processes that a program starts, only its ranks do.
    known : bool
        The rank is known.
    guessed : bool
        The answer was rank 0 of 1 since nothing said otherwise; it may turn out to be wrong.
    """

    def __init__(self, told: tuple[int, int] | None) -> None:
        self.told = told
        self.automatic = self.known = self.guessed = False
        self._began_s = time.monotonic()

    def look(self) -> None:
        """Ask torch.distributed in the training thread, which may have left it when the writer thread asks."""
        if self.told is None and not self.known:
            self.told = launchinfo.rank_in_group()

    def find(self, *, training: bool, last: bool) -> tuple[int, int] | None:
        """Return rank and world size; None while they may still be told.

        Parameters
        ----------
        training : bool
            A step has begun: a program with several ranks has initialised torch.distributed by then.
        last : bool
            The recording ends.
        """
        place = self.told or launchinfo.rank_in_group()
        if place is None and (training or not self.automatic):
            place = launchinfo.rank_of()
            patience_s = TORCH_PATIENCE_S if "torch" in sys.modules else PATIENCE_S
            if place is None and (last or training or time.monotonic() - self._began_s >= patience_s):
                self.guessed, place = True, (0, 1)
        self.known = place is not None
        return place

    def correction(self) -> tuple[int, int] | None:
        """Return what torch.distributed says after a guess."""
        return launchinfo.rank_in_group() if self.guessed else None
