"""The table of figures, by name; every one is a function, `landscape.plots.surface("results.h5")`.

The data of such a call are a results file, results of `landscape.measure`, or what `landscape.open` returns; `ax` are
your own axes, a figure or a subfigure; see `from_python.figure` for the other arguments. Without `ax` the whole figure
is returned, with legend and caption.

To add a figure: a module in `figures` with its name, a row in this table, and a test. Other packages add theirs by
entry points, see `landscape.plugins`.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from landscape.plots.figure import FigureEntry, LayerPlot
from landscape.plugins import beside

FIGURES: dict[str, FigureEntry] = {
    figure.name: figure
    for figure in (
        FigureEntry("surface", "surface", needs=("loss", "done", "x", "y"), live="surface"),
        FigureEntry("surface_heat", "surface", needs=("loss", "done", "x", "y"), live="surface"),
        FigureEntry("surface_error", "surface", needs=("loss_se", "loss", "x", "y"), finite=2),
        FigureEntry("surface_relief", "surface", needs=("loss", "x", "y"), panels=("3d",), live="surface"),
        FigureEntry("surface_height", "surface", seeds=True, needs=("loss", "height", "radius")),
        FigureEntry("surface_3d", "surface", needs=("loss", "done", "x", "y"), panels=("3d",), live="surface"),
        FigureEntry("surface_basins", "surface", needs=("profile_mean", "profile_most", "score_margin", "basin_mean",
            "distance"), panels=(None,) * 2),
        FigureEntry("objective", "surface", needs=("objective", "done", "x", "y"), panels=("3d",)),
        FigureEntry("path", "surface", needs=("loss", "done", "x", "y", "path_x", "path_y"), live="surface"),
        FigureEntry("saddle", "surface", needs=("loss", "rise_se", "done", "x", "y"), panels=(None,) * 2),
        FigureEntry("line", "line", needs=("loss", "loss_se", "accuracy", "done", "t"), panels=(None,) * 2),
        FigureEntry("line_basins", "line", needs=("score_value", "score_worse_se", "score_margin", "basin_radius",
            "t"), panels=(None,) * 2),
        FigureEntry("barriers", "barriers", needs=("barrier_matrix", "barrier_matrix_se", "checkpoint_name")),
        FigureEntry("align", "align", needs=("loss", "loss_se", "accuracy", "done", "curve", "t"),
            panels=(None,) * 2),
        FigureEntry("trajectory", "trajectory", needs=("radius", "angle", "pc1", "pc2"), panels=("polar", None),
            live="trajectory"),
        FigureEntry("trajectory_loss", "trajectory", needs=("loss", "loss_se", "plane_loss", "plane_loss_se",
            "off_plane"), panels=(None,) * 2, live="trajectory"),
        FigureEntry("hessian", "hessian", needs=("eigenvalue",), lacks=("group",), panels=(None,) * 2,
            live="spectra"),
        FigureEntry("hessian_density", "hessian", needs=("nodes", "weights"), lacks=("group",)),
        FigureEntry("hessian_loss", "hessian", needs=("eigenvalue", "loss"), lacks=("group",)),
        FigureEntry("hessian_phases", "hessian", needs=("nep", "ape", "largest"), lacks=("group",),
            panels=(None,) * 3),
        FigureEntry("hessian_layers", "hessian", needs=("largest", "smallest", "name", "group")),
        FigureEntry("trace", "trace", needs=("trace", "trace_se", "batch_trace", "batch_trace_se")),
        FigureEntry("trace_blocks", "trace", needs=("off_block", "rows_off_block", "rows_non_gauss_newton", "name")),
        FigureEntry("density", "density", needs=("nodes", "weights", "mean", "mean_se", "smallest", "largest"),
            lacks=("block",), live="spectra"),
        FigureEntry("density_blocks", "density", needs=("js_distance", "heterogeneity", "nodes", "weights", "name"),
            panels=(None,) * 2),
        FigureEntry("convexity", "convexity", needs=("ratio", "converged", "x", "y")),
        FigureEntry("flatness", "flatness", needs=("value", "se", "measure_name", "measure_units", "flatter")),
        FigureEntry("step", "step", needs=("directional_sharpness", "gradient_sharpness", "critical_sharpness",
            "actual_change"), panels=(None,) * 2),
        FigureEntry("step_prediction", "step", needs=("predicted_change", "actual_change", "other_actual_change")),
        FigureEntry("noise_scale", "noise-scale", needs=("gradient_noise", "simple", "simple_low", "simple_high",
            "simple_resolved"), panels=(None,) * 2),
        FigureEntry("sensitivity", "sensitivity", needs=("loss_increase", "loss_increase_se",
            "together_loss_increase", "sum_loss_increase", "setting_name"), panels=(None,) * 2),
        FigureEntry("sensitivity_predictor", "sensitivity", needs=("predictor", "loss_increase", "rank_correlation"),
            finite=2),
        FigureEntry("fourier", "fourier", seeds=True, needs=("delta_log_amplitude", "frequency", "depth")),
        FigureEntry("fourier_depth", "fourier", seeds=True,
            needs=("high_frequency", "depth", "kind", "reduces"), live="layers",
            layers=(LayerPlot("high_frequency", "Fourier: log amplitude at the highest frequency", "nats"),)),
        FigureEntry("fourier_spectrum", "fourier", needs=("spectrum", "row_frequency", "column_frequency", "kind")),
        FigureEntry("variance", "variance", seeds=True, needs=("variance", "depth", "kind", "reduces"), live="layers",
            layers=(LayerPlot("variance", "Variance of feature maps over positions", "feature²", logarithmic=True),)),
        FigureEntry("similarity", "similarity", needs=("cka", "stage", "kind", "reduces", "other_stage"),
            live="layers"),
        FigureEntry("attention", "attention", seeds=True,
            needs=("distance", "mutual_information", "depth"), live="layers",
            layers=(LayerPlot("distance", "Attention distance, mean and heads", "pixels"),
            LayerPlot("mutual_information", "Attention: mutual information of query and key"))),
        FigureEntry("attention_diversity", "attention", needs=("token_cosine", "head_cosine", "depth_cosine",
            "depth")),
        FigureEntry("attention_spectrum", "attention", needs=("image_singular_value", "token_singular_value",
            "depth")),
        FigureEntry("attention_maps", "attention-maps", needs=("attention", "picture", "place", "depth")),
        FigureEntry("tokens", "tokens", needs=("position", "divergence", "depth")),
        FigureEntry("tokens_moved", "tokens", needs=("stream_position", "common", "depth"), panels=("3d",)),
        FigureEntry("geometry", "geometry", seeds=True,
            needs=("effective_rank", "participation_ratio", "depth", "kind"),
            live="layers", layers=(LayerPlot("effective_rank", "Geometry: effective rank of the features"),
            LayerPlot("participation_ratio", "Geometry: participation ratio of the features"),
            LayerPlot("intrinsic_dimension", "Geometry: intrinsic dimension of the features (TwoNN)"),
            LayerPlot("class_separation", "Geometry: class separation"), LayerPlot("nc1",
            "Geometry: NC1, variation within classes over that between them", logarithmic=True))),
        FigureEntry("lesion", "lesion", seeds=True,
            needs=("accuracy_drop", "accuracy_drop_se", "name", "kind", "stage"),
            instead="loss_increase", live="layers", layers=(LayerPlot("accuracy_drop",
            "Lesion: accuracy lost without the unit", bars=True), LayerPlot("loss_increase",
            "Lesion: loss gained without the unit", "nats", bars=True))),
        FigureEntry("probe_linear", "probe-linear", seeds=True,
            needs=("accuracy", "accuracy_se", "depth", "kind", "reduces"),
            live="layers", layers=(LayerPlot("accuracy", "Linear probe: accuracy of a linear classifier"),)),
        FigureEntry("uncertainty", "uncertainty", seeds=True, needs=("data_uncertainty", "depth", "kind", "reduces"),
            live="layers", layers=(LayerPlot("data_uncertainty", "Uncertainty of feature maps over positions"),)),
        FigureEntry("uncertainty_covariance", "uncertainty", needs=("data_covariance", "gaussian_covariance",
            "depth")),
        FigureEntry("calibration", "calibration", needs=("ece", "bin_count", "bin_accuracy", "scaled_bin_count"),
            panels=(None,) * 2),
        FigureEntry("calibration_train", "calibration", needs=("nll", "nll_low", "accuracy", "accuracy_low")),
        FigureEntry("calibration_test", "calibration", needs=("nll", "nll_low", "accuracy", "accuracy_low")),
        FigureEntry("ensemble", "ensemble", needs=("nll", "nll_low", "ece", "member_nll", "epistemic_entropy"),
            panels=(None,) * 6),
        FigureEntry("ensemble_diversity", "ensemble", needs=("disagreement", "cka", "name"), panels=(None,) * 2),
        FigureEntry("corruption", "corruption", needs=("type_accuracy", "accuracy", "corruption_name"),
            instead="accuracy"),
        FigureEntry("corruption_severity", "corruption", seeds=True,
            needs=("severity_accuracy", "severity"), instead="accuracy"),
        FigureEntry("corruption_sizes", "corruption", needs=("size_mean_nll", "size_mean_nll_se", "size")),
        FigureEntry("corruption_heat", "corruption", needs=("accuracy", "nll", "ece", "corruption_name", "severity")),
        FigureEntry("perturbation", "perturbation", needs=("consistency", "cross_entropy", "perturbation_name")),
        FigureEntry("perturbation_frames", "perturbation", needs=("consistency_at", "accuracy_at", "frames")),
        FigureEntry("attack", "attack", seeds=True, needs=("accuracy", "loss", "accuracy_drop", "eps", "method_name"),
            instead="loss"),
        FigureEntry("input_surface", "input-surface", needs=("line_rise", "line_rise_se", "direction_name", "t"),
            panels=(None,) * 2),
        FigureEntry("input_images", "input-surface", needs=("image_loss", "image_accuracy", "image", "x", "y")),
        FigureEntry("noise", "noise", seeds=True,
            needs=("accuracy_drop", "accuracy_drop_se", "band"), instead="loss_increase"),
        FigureEntry("noise_pictures", "noise", needs=("noisy_image", "image", "mask", "band")),
        FigureEntry("shape_bias", "shape-bias", needs=("category_bias", "shape_bias", "category_name")),
        FigureEntry("stream", "stream", needs=("nll", "nll_change_low", "ece", "tau", "method_name", "passes",
            "seconds_per_frame")),
        FigureEntry("stream_frames", "stream", needs=("frame_nll", "frame_accuracy", "best", "tau")),
        FigureEntry("monitor", "monitor", needs=("eigenvalue", "threshold", "converged", "step")),
        FigureEntry("monitor_preconditioned", "monitor", needs=("preconditioned", "preconditioned_threshold",
            "preconditioned_converged", "step")),
        FigureEntry("monitor_critical", "monitor", needs=("critical_sharpness", "learning_rate", "step")),
        FigureEntry("monitor_noise", "monitor", needs=("noise_scale", "gradient_variance", "gradient_squared",
            "step")),
    )
}  # fmt: skip


def _of_other_packages() -> Iterator[FigureEntry]:
    """Their rows; one that cannot be used is left out with a note on stderr, for the others are drawn without it."""
    for name, added in beside("figures", FIGURES).items():
        try:
            entry = added.load()
            if not isinstance(entry, FigureEntry) or entry.name != name:
                raise added.broken("it is no FigureEntry of that name")
            added.require_api(entry.api)
        except ValueError as error:
            print(f"note: {error}", file=sys.stderr)
        else:
            yield replace(entry, module_name=added.place.partition(":")[0])


FIGURES |= {figure.name: figure for figure in _of_other_packages()}

# Figures of several probes together, by name of the file; the module offers `studies`, `page` of a study, and MEANING.
STUDIES = ("smoothing", "heads", "sweep", "hybrid", "compare")
IMPORTED = ("hybrid", "compare")  # kinds of results that no probe measures, and that a study draws


def study_module(name: str) -> Any:
    """The module of a study's figure."""
    return import_module(f"{__name__}.figures.{name}_study")


def __getattr__(name: str) -> Any:
    """The function that draws a figure; arguments as of `from_python.figure`, which is imported on use."""
    if name not in FIGURES:
        raise AttributeError(f"module {__name__} has no attribute {name}; its figures are {', '.join(FIGURES)}")
    from landscape.plots.from_python import figure

    return partial(figure, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *FIGURES})
