"""Process groups as this rank sees them: ids that are equal on every member, and sequence numbers."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

from mappnb.capture._patches import Patches, loaded
from mappnb.capture.points import SessionLike

__all__ = ["Group", "Groups", "group_id"]


def group_id(ranks: Sequence[int], backend: str, ordinal: int) -> int:
    """Id of a process group, equal on all its members.

    Parameters
    ----------
    ranks
        Global ranks, in any order.
    backend
        Name of the backend, such as ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``.
    ordinal
        How many groups of the same ranks and backend were created before.

    Returns
    -------
    int
        At least 0, below 2**63.
    """
    text = f"{','.join(map(str, sorted(ranks)))}|{backend}|{ordinal}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Group:
    """One process group: its id, its members, and how many operations this rank has issued on it.

    Attributes
    ----------
    id : int
        See :func:`group_id`.
    ranks : tuple of int
        Global ranks by group rank.
    seq : int
        Collectives issued so far.
    sent, received : dict of int to int
        Point-to-point operations issued so far, by global rank of the other side.
    """

    __slots__ = ("__weakref__", "id", "ranks", "received", "ref", "sent", "seq", "size")

    def __init__(self, pg: Any, ident: int, ranks: tuple[int, ...]) -> None:
        self.ref: Any = weakref.ref(pg)
        self.id = ident
        self.ranks = ranks
        self.size = len(ranks)
        self.seq = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def next_pair(self, peer: int, *, send: bool) -> int:
        """Sequence number of a send to, or a receive from, the global rank ``peer`` that is issued now."""
        counts = self.sent if send else self.received
        seq = counts.get(peer, 0)
        counts[peer] = seq + 1
        return seq

    def global_rank(self, rank: int) -> int:
        """Global rank of a group rank; -1 if there is none."""
        return self.ranks[rank] if 0 <= rank < self.size else -1


class Groups:
    """All process groups of this rank, numbered in the order of their creation.

    Notes
    -----
    torch requires that all members create their groups in the same order, so the ordinal among groups of equal ranks
    and backend is the same on each. Groups that were created *and* destroyed before recording began are not counted,
    on any member.
    """

    def __init__(self, session: SessionLike) -> None:
        self._session = session
        self._by_id: dict[int, Group] = {}
        self._by_name: dict[str, Group] = {}
        self._created: dict[tuple[tuple[int, ...], str], int] = {}

    def of(self, pg: Any) -> Group:
        """Return what is known of a group; groups seen first now are numbered first."""
        found = self._by_id.get(id(pg))
        if found is not None and found.ref() is pg:
            return found
        self.number()
        found = self._by_id.get(id(pg))
        return found if found is not None and found.ref() is pg else self._unregistered(pg)

    def named(self, name: str) -> Group | None:
        """Return the group that torch calls ``name``."""
        found = self._by_name.get(name)
        if found is None or found.ref() is None:
            self.number()
            found = self._by_name.get(name)
        return found

    def number(self) -> None:
        """Give an id to every group that has none yet, in the order of creation."""
        c10d = loaded("torch.distributed.distributed_c10d")
        world = getattr(c10d, "_world", None)
        if world is None:
            return
        for pg, (backend, _) in list(world.pg_map.items()):
            known = self._by_id.get(id(pg))
            if (known is None or known.ref() is not pg) and pg in world.pg_group_ranks:
                by_rank = sorted(world.pg_group_ranks[pg].items(), key=lambda item: item[1])
                self._add(pg, tuple(r for r, _ in by_rank), str(backend), str(world.pg_names.get(pg, "")))

    def watch(self, patches: Patches) -> None:
        """Have groups numbered whenever one is about to be created or destroyed."""
        c10d, dist = loaded("torch.distributed.distributed_c10d"), loaded("torch.distributed")

        def make(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._number_safely()
                return original(*args, **kwargs)

            return call

        for owner, name in (
            (c10d, "_new_process_group_helper"),
            (c10d, "_register_pg_in_world"),
            (c10d, "destroy_process_group"),
            (dist, "destroy_process_group"),
        ):
            if owner is not None:
                patches.wrap(owner, name, make)

    def _number_safely(self) -> None:
        if not self._session.recorder.enabled:
            return
        try:
            self.number()
        except Exception as err:  # noqa: BLE001
            self._session.fail("process groups", err)

    def _add(self, pg: Any, ranks: tuple[int, ...], backend: str, name: str) -> None:
        key = (tuple(sorted(ranks)), backend)
        ordinal = self._created.get(key, 0)
        self._created[key] = ordinal + 1
        group = Group(pg, group_id(ranks, backend, ordinal), ranks)
        self._by_id[id(pg)] = self._by_name[name] = group
        desc = str(getattr(pg, "group_desc", ""))
        self._session.add_group(group.id, ranks=list(ranks), backend=backend, desc=desc, name=name, ordinal=ordinal)

    def _unregistered(self, pg: Any) -> Group:
        """Make do with a group that torch.distributed does not know: its members are known by group rank only."""
        group = Group(pg, group_id((-1, pg.size()), type(pg).__name__, 0), tuple(range(pg.size())))
        self._by_id[id(pg)] = group
        return group
