"""Rules of figures over layers, units, bands and attacks: panels that are flat or saturated, and what has no error."""

from collections.abc import Iterator

import numpy as np
from scipy.special import bdtrc, ndtri

from landscape.doctor.finding import Finding, Result, found, measure_again, more_samples
from landscape.options import counted, listed
from landscape.statistics.rounding import plus_minus
from landscape.statistics.stored import half_width

LEVEL = 0.05  # of a statement about a whole panel, divided by the number of its points (Bonferroni)
CHANGES = ("_increase", "_drop", "_rise", "_rate")  # ends of names of differences from the intact network
DROPS = {"lesion": "removed unit", "noise": "band", "attack": "attack"}


def flat_panel(result: Result) -> Iterator[Finding]:
    """No point of the panel differs from the intact network by more than its paired error.

    Judged on the loss increase, which moves before the accuracy does, each of m points at 5 % / m (Bonferroni).
    """
    rise, error = result.values("loss_increase"), result.values("loss_increase_se")
    if result.probe not in DROPS or not result.complete or rise.shape != error.shape or not rise.size:
        return
    known = np.isfinite(rise) & np.isfinite(error) & (error > 0)
    if known.any() and (np.abs(rise[known]) < ndtri(1 - LEVEL / 2 / known.sum()) * error[known]).all():
        k = np.unravel_index(int(np.argmax(np.where(known, np.abs(rise), -1))), rise.shape)
        text = (
            f"no {DROPS[result.probe]} changes the loss by more than its error on {result.samples} samples (at most "
            f"{plus_minus(rise[k], half_width(result.data, 'loss_increase')[k])}): the panel is flat"
        )
        yield found("flat-panel", "suspicious", result, text, _stronger(result), cause=result.probe)


def zero_panel(result: Result) -> Iterator[Finding]:
    """Every change that the panel shows is exactly zero, and so is its error: nothing was changed."""
    names = [name for name in map(str, result.data.variables) if f"{name}_se" in result.data.variables]
    panels = {name: result.values(name) for name in names if name.endswith(CHANGES)}
    finite = {name: values[np.isfinite(values)] for name, values in panels.items() if values.ndim}
    shown = {name: values for name, values in finite.items() if values.size > 1}
    if not result.complete or not shown or any(values.any() for values in shown.values()):
        return
    if any(np.nan_to_num(result.values(f"{name}_se")).any() for name in shown):
        return
    yield found(
        "zero-panel", "suspicious", result,
        f"every value of {', '.join(shown).replace('_', ' ')} is exactly zero, without error: nothing was changed",
        _stronger(result), cause=result.probe,
    )  # fmt: skip


def _stronger(result: Result) -> str:
    eps = str(result.parameters.get("eps", ""))
    if result.probe == "noise" and eps:
        return measure_again(result, "use a larger --eps", eps=f"{4 * max(map(float, eps.split(','))):.3g}")
    if result.probe == "attack":
        return measure_again(result, "use larger --eps", eps="1/255,4/255,8/255,16/255")
    return more_samples(result, 3.0)


def saturated_panel(result: Result) -> Iterator[Finding]:
    """Every point of the panel is at chance level or below: what differs between the points cannot be seen.

    The accuracy of the changed network at every band or attack is no better than guessing (binomial test, 5 %).
    """
    drop, intact = result.values("accuracy_drop"), float(result.attribute("intact_accuracy", np.nan))
    n, classes = result.samples, result.classes
    if result.probe not in ("noise", "attack") or not (classes > 1 and n and drop.size and result.complete):
        return
    hits = np.round((intact - drop) * n)
    known = np.isfinite(hits)
    if known.any() and intact > 2 / classes and (bdtrc(hits[known] - 1, n, 1 / classes) >= LEVEL).all():
        eps = str(result.parameters.get("eps", ""))
        smaller = "0.1,0.3" if result.probe == "noise" else "0.25/255,0.5/255,1/255,2/255"
        yield found(
            "saturated-panel", "suspicious", result,
            f"at every {DROPS[result.probe]} (--eps {eps}) the accuracy is at most {(intact - drop[known].min()):.3f}, "
            f"no better than guessing among {classes} classes: the panel is saturated",
            measure_again(result, "use a smaller --eps", eps=smaller),
        )  # fmt: skip


def dead_layers(result: Result) -> Iterator[Finding]:
    """Feature maps that are constant over positions have no variance and no frequency: a layer whose units are dead.

    Constant up to float32 rounding (2^-23) of their mean square. The global pooling and the head have no positions and
    are not measured.
    """
    share = result.values("variance_normalised")
    if result.probe != "variance" or not share.size:
        return
    variance = result.values("variance")  # of a map of zeros the share is undefined
    dead = np.isfinite(share) & (share < 2.0**-23) | ((variance == 0) if variance.shape == share.shape else False)
    if dead.any():
        names = [name for name, is_dead in zip(result.names("name"), dead, strict=True) if is_dead]
        yield found(
            "dead-layers", "suspicious", result,
            f"feature maps of {listed(names)} are constant over positions",
            "see the layers with: landscape layers "
            f"{result.spec.get('checkpoint') or 'CHECKPOINT'}; weights of zeros or dead units do this",
        )  # fmt: skip


def depth_unknown(result: Result) -> Iterator[Finding]:
    """The largest difference between two layers is within its error: too few samples for a statement over depth.

    Errors of two layers are on the same samples and combined as if independent, which overstates that of a difference
    of positively correlated values. Judged at 5 % over all pairs (Bonferroni).
    """
    name = {"fourier": "high_frequency", "variance": "variance", "uncertainty": "data_uncertainty"}.get(
        result.probe, ""
    )
    value, error = result.values(name), result.values(f"{name}_se")
    if not name or value.shape != error.shape or len(value) < 2 or not np.isfinite(value).any():
        return
    low, high = int(np.nanargmin(value)), int(np.nanargmax(value))
    pairs = len(value) * (len(value) - 1) / 2
    needed = ndtri(1 - LEVEL / 2 / pairs) * float(np.hypot(error[low], error[high]))
    if value[high] - value[low] <= needed and result.complete:  # of one sample there is no error
        yield found(
            "depth-unknown", "suspicious", result,
            f"layers differ by at most {value[high] - value[low]:.2g}, within the error {needed:.2g} of the difference "
            f"on {result.samples} samples",
            more_samples(result, 2.0), cause=result.probe,
        )  # fmt: skip


def announced_spike(result: Result) -> Iterator[Finding]:
    """The monitor announced a loss spike, by the rule that its `alarm` states."""
    at = result.values("step")[result.values("alarm") == 1] if result.probe == "monitor" else np.array([])
    if at.size:
        yield found(
            "announced-spike", "suspicious", result,
            f"updates cost far more than before in {counted(at.size, 'row')}, from step {at[0]:.0f} on: a loss spike "
            "may follow",
            "look at the loss and at what changed there; a lower learning rate, or a warmup, avoids it",
        )  # fmt: skip


def same_members(result: Result) -> Iterator[Finding]:
    """Members that agree on every sample are the same network: their average is no ensemble."""
    disagreement, divergence = result.values("disagreement"), result.values("divergence")
    if result.probe == "ensemble" and disagreement.size and result.complete and np.nanmax(np.abs(disagreement)) == 0:
        if divergence.size and np.nanmax(np.abs(divergence)) > 0:
            return
        yield found(
            "same-members", "wrong", result, "the members agree on every sample: they are the same network",
            "give networks of different training runs: landscape ensemble A.pt B.pt C.pt",
        )  # fmt: skip
