"""The table of rules, and the examination of results files by all of them. To add one: a function, a row, a test."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import xarray as xr

from landscape.checkpoints.raw_files import sha256_of
from landscape.doctor import panels, premises, protocols, spectra, surfaces
from landscape.doctor.finding import SEVERITIES, Finding, Result, Rule, RuleOfSeveral, found
from landscape.options import counted, listed
from landscape.results import reader
from landscape.results.reader import Stored
from landscape.results.run_key import ReduceOf
from landscape.results.unmerged_journals import standings

ROUNDING = 1e-6  # of the largest entry of a summary, which other versions of libraries sum in another order
MOST = 2**28  # bytes of a result that are held to compute its summaries
Reduce = Callable[[dict[str, np.ndarray]], Mapping[str, Any]]
Outdated = Callable[[xr.Dataset, Sequence[tuple[str, xr.Dataset]]], str]


def changed(result: Result, reduce_of: ReduceOf) -> Iterator[Finding]:
    """Numbers or attributes that are not as they were written, which the checksum says; which, where that is known."""
    if result.data.nbytes > MOST:
        yield found(
            "changed", "note", result,
            f"{result.data.nbytes / 2**20:,.0f} MiB of numbers are not compared with their checksum",
            f"a result of at most {MOST >> 20} MiB is checked",
        )  # fmt: skip
    elif not cast(Stored, result.data).intact():
        reduce = reduce_of(result.probe, result.parameters)
        text = "its numbers or attributes were changed after they were measured: they do not match their checksum"
        which = list(summaries(result, reduce)) if reduce is not None else []
        yield from which or [found("changed", "wrong", result, text, _anew(result))]


def summaries(result: Result, reduce: Reduce) -> Iterator[Finding]:
    """Stored summaries that do not follow from the stored units: one of the two was changed afterwards."""
    arrays = {str(name): array.values for name, array in result.data.variables.items()}
    try:
        computed = reduce(arrays)
    except Exception:  # of a result that lacks what a summary is of, which is said elsewhere
        return
    changed = []
    for name, value in computed.items():
        if name not in arrays or arrays[name].dtype.kind != "f" or np.shape(value) != arrays[name].shape:
            continue
        known, again = arrays[name], np.asarray(value, dtype=float)
        size = np.abs(again[np.isfinite(again)]).max(initial=0.0)
        with np.errstate(invalid="ignore"):
            apart = np.abs(known - again) > ROUNDING * max(float(size), 1e-300)
        if (apart | (np.isnan(known) != np.isnan(again))).any():
            changed.append(name)
    if changed:
        yield found(
            "summaries", "wrong", result,
            f"{len(changed)} stored summaries ({', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''}) do not "
            "follow from the stored units",
            _anew(result),
        )  # fmt: skip


def _anew(result: Result) -> str:
    command = result.command()
    return f"run: {command} --overwrite" if command else "measure it again with --overwrite"


def unfinished(result: Result) -> Iterator[Finding]:
    """Units are missing: summaries and figures are of the finished ones only."""
    if result.complete:
        return
    total, missing = result.data.variables["done"].size, int((result.data.variables["done"].values != 1).sum())
    lacking = f"{missing:,} of {counted(total, 'unit', ',')} missing"
    journal = next((s for s in standings(result.file) if s.group == result.group), None)
    if journal is not None and journal.running:
        yield found(
            "unfinished", "note", result, f"{lacking}; a process is measuring them",
            f"follow it with: landscape show {result.file} --follow",
        )  # fmt: skip
        return
    command = result.command()
    remedy = f"run: {command}" if command else f"see: landscape show {result.file} --pending"
    if _replaced(result):
        remedy = f"{result.spec['checkpoint']} is another checkpoint since: only its older file can finish them"
    yield found("unfinished", "suspicious", result, lacking, remedy)


def _replaced(result: Result) -> bool:
    """Whether the file that was measured has another content now."""
    path, sha256 = result.spec.get("checkpoint"), result.attribute("checkpoint_sha256")
    return bool(path and sha256 and Path(path).is_file() and sha256_of(Path(path)) != sha256)


OF_ONE: Sequence[Rule] = (
    unfinished,
    premises.at_chance, premises.loss_at_chance, premises.loss_above_guessing, premises.loss_not_finite,
    premises.few_per_class,
    premises.repeated_samples, premises.mini_batch, premises.contradicts_checkpoint, premises.overconfident,
    surfaces.minimum_at_the_edge, surfaces.minimum_elsewhere, surfaces.too_wide, surfaces.too_narrow, surfaces.no_rise,
    surfaces.no_centre, surfaces.not_finite, surfaces.clipped, surfaces.rough_preview, surfaces.inexact_pass,
    surfaces.frozen_ends, surfaces.frozen_corners, surfaces.frozen_path, surfaces.barrier_unknown, surfaces.short_path,
    spectra.unconverged, spectra.without_spectrum, spectra.few_values, spectra.few_vectors, spectra.tolerance_missed,
    spectra.kinks, spectra.copies, spectra.derivatives,
    panels.flat_panel, panels.zero_panel, panels.saturated_panel, panels.dead_layers, panels.depth_unknown,
    panels.same_members, panels.announced_spike,
)  # fmt: skip
OF_A_PROBE: Sequence[RuleOfSeveral] = (
    protocols.differing_protocols, protocols.other_samples,
)  # fmt: skip
OF_ALL: Sequence[RuleOfSeveral] = (
    protocols.drawn_anew, protocols.one_label, protocols.same_weights, protocols.losses_disagree, protocols.one_seed,
    protocols.versions_differ, premises.too_few_samples, premises.leaked_test, premises.mixed_seeds,
)  # fmt: skip


def examine(
    paths: Sequence[Path | str], reduce_of: ReduceOf | None = None, outdated: Outdated | None = None
) -> list[Finding]:
    """Everything that the rules find in results files, which are compared as if they were one; the worst first.

    With `reduce_of`, which gives the `reduce` of a probe, results are compared with their checksums; with `outdated`,
    which says in words why a stored comparison is out of date, comparisons with what the files hold now. What one cause
    does to several results is one finding.

    Large arrays are read when a rule needs them, and not kept.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is not a results file; see the message.
    """
    with ExitStack() as files:
        read = [(Path(path), files.enter_context(reader.streaming(path, on_demand=True))) for path in paths]
        files.enter_context(reader.using(*paths))
        results = [Result(path, group, data) for path, stored in read for group, data in stored]
        since = [one for result in results if reduce_of for one in changed(result, reduce_of)]
        since += [one for result in results if outdated for one in stale(result, results, outdated)]
        named = by_cause([*since, *_findings(results)])
        return sorted(named, key=lambda finding: SEVERITIES.index(finding.severity))


def stale(result: Result, results: Sequence[Result], outdated: Outdated) -> Iterator[Finding]:
    """A stored comparison whose numbers were measured again, or to which others came."""
    if result.probe == "compare":
        own = [(one.group, one.data) for one in results if one.file == result.file]
        if said := outdated(result.data, own):
            yield found(
                "stale-comparison", "suspicious", result, said.partition(";")[0],
                f"run: {shlex.join(['landscape', 'compare', str(result.file)])}",
            )  # fmt: skip


def by_cause(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for what one cause does to several results: the first, which names the others."""
    known: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        known.setdefault((finding.rule, finding.severity, finding.cause), []).append(finding)
    return [_together(of_cause) for of_cause in known.values()]


def _together(findings: Sequence[Finding]) -> Finding:
    first = findings[0]
    others = list(dict.fromkeys(g for one in findings for g in one.groups if g not in first.groups))
    if not others:
        return first
    text = f"{first.text}; likewise {listed(others)}"
    return replace(first, groups=(*first.groups, *others), text=text)


def _findings(results: Sequence[Result]) -> list[Finding]:
    by_probe: dict[str, list[Result]] = {}
    for result in results:
        by_probe.setdefault(result.probe, []).append(result)
    findings = [finding for result in results for rule in OF_ONE for finding in rule(result)]
    findings += [finding for some in by_probe.values() for rule in OF_A_PROBE for finding in rule(some)]
    return [*findings, *(finding for rule in OF_ALL for finding in rule(results))]
