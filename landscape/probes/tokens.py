"""Place the tokens of some images by t-SNE, or on principal axes around attention (Park et al. 2023, 2305.00729)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from landscape.discovery.layer import Layer
from landscape.headline import Headline
from landscape.layers import layer_patterns
from landscape.layers.attention_statistics import AXES, attended_layers, first_tokens, on_principal_axes, tokens_around
from landscape.layers.selection import layer_labels, spatial_layers
from landscape.options import at_least, one_of, parse_numbers, require
from landscape.predictions.scores import padded
from landscape.probe import Plan, Probe, Quantity, Unit, Values, make_texts
from landscape.statistics import means, stored
from landscape.subject import weights_cache
from landscape.subject.loading.identity import protocol
from landscape.subject.subject import Subject


@dataclass(frozen=True)
class Tokens(Probe):
    """Coordinates of every token of the first images in one t-SNE per layer (van der Maaten & Hinton 2008).

    Tokens are the positions of a layer's map, without prefix. The start is their first two principal components, so
    that equal tokens give equal coordinates; t-SNE is scikit-learn's (Barnes-Hut), on the CPU.

    `method` principal places the tokens of each image in the residual stream before and after self-attention on the
    first three principal axes of both, and stores how much of their displacement is common to all tokens.
    """

    name: ClassVar[str] = "tokens"
    logits: ClassVar[bool] = False
    smallest: ClassVar[Mapping[str, Any]] = {"images": 2, "perplexity": 2.0, "depths": "0,1"}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("common displacement", "common", {"layer": "last"}, where="at {name}"),
        Headline("divergence", "divergence", {"layer": "last"}, where="at {name}"),
    )

    layers: layer_patterns.LayerPatterns = ()
    method: Annotated[
        Literal["tsne", "principal"], "tsne, or principal: three principal axes of tokens before and after attention"
    ] = "tsne"
    images: Annotated[int, "number of images, the first of the data"] = 18
    perplexity: Annotated[float, "effective number of neighbours of a token"] = 20.0
    depths: Annotated[str, "normalised depths whose nearest layers are embedded; with --layers, all of these"] = (
        "0,0.5,1"
    )
    seed: Annotated[int, "seed of t-SNE"] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_patterns.expand(self.layers))
        make_texts(self, "depths")
        one_of("method", self.method, ("tsne", "principal"))
        at_least("images", self.images, 1)
        require(0 < self.perplexity < np.inf, "perplexity", self.perplexity, "above 0, such as 20")
        inside = all(0 <= depth <= 1 for depth in parse_numbers("depths", self.depths))
        require(inside, "depths", self.depths, "numbers from 0 to 1")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """Options of the other method do not matter."""
        return {} if self.method == "tsne" else dict.fromkeys(("perplexity", "seed"))

    def plan(self, subject: Subject) -> Plan:
        layers = self._layers(subject)
        if self.method == "principal":
            return self._plan_of_axes(subject, layers)
        counts = np.array([layer.grid[0] * layer.grid[1] for layer in layers])
        few = counts * self.images <= self.perplexity
        if few.any():
            first = layers[int(few.argmax())]
            raise ValueError(
                f"{self.images} images have {int(counts[few][0]) * self.images} tokens at {first.name}, t-SNE needs "
                f"more than its perplexity of {self.perplexity:g}; lower --perplexity, or raise --images"
            )
        _tsne()
        return Plan(
            over={"layer": np.arange(len(layers))},
            axes={"image": np.arange(self.images), "token": np.arange(counts.max()), "coordinate": np.arange(2)},
            labels=layer_labels(layers, "layer"),
            quantities={
                "position": Quantity("t-SNE coordinates of a token", dims=("image", "token", "coordinate")),
                "divergence": Quantity("Kullback-Leibler divergence of the embedding", "nats"),
            },
            about={"token": Quantity("token, row by row")},
            facts={"protocol": protocol(subject, samples=self.images)},
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (i,) = unit.index
        layer = self._layers(subject)[i]
        if self.method == "principal":
            found = dict(on_principal_axes(*tokens_around(subject, layer, self.images)))
            return {**found, "stream_position": padded(found["stream_position"], self._widest(subject), 2)}
        tokens = _tokens(subject, self.layers, self.images)[layer.name]  # (image, token, channel)
        if (tokens == tokens[:1, :1]).all():  # which have no embedding
            return {"position": np.full((self.images, self._widest(subject), 2), np.nan), "divergence": np.nan}
        embedding = _tsne()(perplexity=self.perplexity, init="pca", random_state=self.seed % 2**32)
        placed = embedding.fit_transform(tokens.reshape(-1, tokens.shape[-1])).reshape(*tokens.shape[:2], 2)
        return {
            "position": padded(placed.astype(float), self._widest(subject), 1),
            "divergence": float(embedding.kl_divergence_),
        }

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """The common displacement, mean over images."""
        if "common_displacement" not in data:
            alike = data["name"][np.isnan(data["divergence"])]
            return stored.unmeasured(
                (name, layer, "all tokens are equal") for name in ("position", "divergence") for layer in alike
            )
        rows = [means.mean_and_standard_error(row) for row in data["common_displacement"]]
        return {"common": np.array([mean for mean, _ in rows]), "common_se": np.array([error for _, error in rows])}

    def _plan_of_axes(self, subject: Subject, layers: list[Layer]) -> Plan:
        narrow = [layer for layer in layers if min(layer.channels, 2 * layer.grid[0] * layer.grid[1]) < AXES]
        if narrow:
            raise ValueError(f"{narrow[0].name} has {narrow[0].channels} channels, expected at least {AXES}")
        each = ("image",)
        axes = {"side": 2, "image": self.images, "token": self._widest(subject), "axis": AXES}
        return Plan(
            over={"layer": np.arange(len(layers))},
            axes={name: np.arange(count) for name, count in axes.items()},
            labels=layer_labels(layers, "layer"),
            quantities={
                "stream_position": Quantity("principal coordinates of a token", "feature", tuple(axes)),
                "explained": Quantity("share of the variance of an image's tokens", dims=("image", "axis")),
                "common_displacement": Quantity("share of the displacement that all tokens have in common", dims=each),
            },
            summaries={
                "common": Quantity("common share of a displacement, mean over images", dims=("layer",), bounds="share",
                                   error="images", over="image"),
            },
            about={
                "token": Quantity("token, row by row"), "side": Quantity("before, after"),
                "axis": Quantity("principal axis"),
            },
            facts={"protocol": protocol(subject, samples=self.images)},
        )  # fmt: skip

    def _widest(self, subject: Subject) -> int:
        return max(layer.grid[0] * layer.grid[1] for layer in self._layers(subject))

    def _layers(self, subject: Subject) -> list[Layer]:
        principal = self.method == "principal"
        found = attended_layers(subject, self.layers) if principal else spatial_layers(subject, self.layers)
        if self.layers:
            return found
        depths = np.array([layer.depth for layer in found])
        wanted = {int(np.abs(depths - depth).argmin()) for depth in parse_numbers("depths", self.depths)}
        return [found[i] for i in sorted(wanted)]


def _tsne() -> Any:
    """scikit-learn's t-SNE. Raises ValueError: scikit-learn is not installed."""
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ValueError(
            "tokens needs scikit-learn for t-SNE, which is not installed; run: pip install 'landscape-probes[tsne]'"
        ) from error
    return TSNE


@weights_cache.once_per_weights
def _tokens(subject: Subject, patterns: tuple[str, ...], images: int) -> dict[str, np.ndarray]:
    """The tokens of the first images at every layer, (image, token, channel), by the layer's name."""
    layers = spatial_layers(subject, patterns)
    found = zip(layers, first_tokens(subject, layers, images), strict=True)
    return {layer.name: tokens.float().numpy() for layer, tokens in found}
