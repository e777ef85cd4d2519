"""Traces of other tools, imported as run directories. One file per format; each registers itself (``register_format``)."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mappnb.capture.importers._errors import TraceImportError
from mappnb.capture.importers._formats import FORMATS, Format, ImportOptions, register_format
from mappnb.capture.importers._sources import Source, Sources, find_sources
from mappnb.capture.importers._write import ImportReport, new_run, write_ranks
from mappnb.errors import did_you_mean

__all__ = ["FORMATS", "ImportReport", "TraceImportError", "import_trace", "register_format"]


def import_trace(
    src: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    run_dir: str | os.PathLike[str],
    *,
    format: str = "auto",
    rank_from: str | None = None,
    replace: bool = False,
) -> ImportReport:
    r"""Import traces of other tools as a run directory, such as capture writes: everything works on it.

    Parameters
    ----------
    src : path or iterable of paths
        File, folder, archive (tar, tar.gz, tar.zst, zip) or a list of these; files may be packed (gz, zst, bz2, xz).
    run_dir : path
        A new or empty folder.
    format : str
        ``"auto"``: told by the content. Or a name of :data:`FORMATS`: kineto, chrome, megascan, ...
    rank_from : str, optional
        Regular expression that finds the rank in a file's path: group ``rank``, or the first group; ``r"node\d+_(\d+)"``.
        By default the rank is what the file itself says, else what its name says.
    replace : bool
        Put the import in the place of a run that is there.

    Returns
    -------
    ImportReport
        What was read, written, skipped and mended; print it.

    Raises
    ------
    TraceImportError
        If nothing can be imported or ranks are not clear: two files claim one, or none is told. Nothing is written then.
    RunExistsError
        If ``run_dir`` holds something else, or a run and ``replace`` is False.

    Notes
    -----
    Times are exact: decimal µs become ns without a double in between. The raw times of a rank are those of its file.
    """
    _load_formats()
    if format != "auto" and format not in FORMATS:
        raise TraceImportError(
            f"unknown format {format!r}; known: auto, {', '.join(sorted(FORMATS))}{did_you_mean(format, FORMATS)}"
        )
    options = ImportOptions(_pattern(rank_from))
    sources = find_sources(src)
    try:
        chosen, used = _choose(sources, format)
        report = ImportReport(run_dir=Path(run_dir), format=chosen.name, files_skipped=sources.skipped)
        with new_run(run_dir, replace=replace) as work:
            write_ranks(work, chosen.read(used, options), report)
        return report
    finally:
        sources.close()


def _pattern(rank_from: str | None) -> re.Pattern[str] | None:
    if rank_from is None:
        return None
    try:
        pattern = re.compile(rank_from)
    except re.error as err:
        raise TraceImportError(
            f"rank_from={rank_from!r}: not a regular expression ({err}); for example r'rank(\\d+)'"
        ) from err
    if not pattern.groups:
        raise TraceImportError(
            f"rank_from={rank_from!r}: no group that holds the rank; put it in brackets: r'rank(\\d+)'"
        )
    return pattern


def _load_formats() -> None:
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}")


def _choose(sources: Sources, wanted: str) -> tuple[Format, Sequence[Source]]:
    """Return the format and the files of it; the others go to ``sources.skipped``."""
    ordered = sorted(FORMATS.values(), key=lambda f: -f.priority)
    by_format: dict[str, list[Source]] = {}
    for source in sources.found:
        if wanted != "auto":
            if not source.explicit and not any(f.detect(source) for f in ordered):
                sources.skipped[source.name] = _what_is(source)
                continue
            by_format.setdefault(wanted, []).append(source)
            continue
        name = next((f.name for f in ordered if f.detect(source)), None)
        if name is None:
            if source.explicit:
                raise TraceImportError(
                    f"{source.name}: {_what_is(source)}; known formats: {', '.join(sorted(FORMATS))}"
                )
            sources.skipped[source.name] = _what_is(source)
            continue
        by_format.setdefault(name, []).append(source)
    if not by_format:
        why = "; ".join(f"{n}: {w}" for n, w in list(sources.skipped.items())[:4])
        raise TraceImportError(
            f"no trace among {len(sources.found)} file(s) ({why}); known formats: {', '.join(sorted(FORMATS))}"
        )
    best = max(by_format, key=lambda n: (FORMATS[n].priority, len(by_format[n])))
    for name, others in by_format.items():
        for source in others if name != best else ():
            sources.skipped[source.name] = (
                f"{name}, while others here are {best}: import it by itself (format={name!r})"
            )
    return FORMATS[best], by_format[best]


def _what_is(source: Source) -> str:
    """Say why a file is no trace that is known."""
    head = source.head()
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if source.damage and not head:
        return source.damage
    if not text:
        return "an empty file"
    if b'"nodes"' in head and b'"schema"' in head:
        return "an execution trace of PyTorch (operators and their inputs, without times), not a profile"
    if text[:1] in b"{[":
        return "JSON, but without trace events ('traceEvents', 'ph', 'ts') in its first 256 KiB; if it is one all the same, give format="
    return f"not a trace: begins with {text[:16]!r}"
