"""The error of importing."""

from __future__ import annotations

from mappnb.errors import MappnbError

__all__ = ["TraceImportError"]


class TraceImportError(MappnbError, ValueError):
    """A trace that cannot be imported: not a trace, nothing in it, or ranks that are not clear. Nothing was written."""
