"""The settings of the recipe lithography."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nbgpu.config.conditions import DefaultRules, Rules, defaults, given, none_of, one_of, only
from nbgpu.config.settings import control, read_from, shape_of_model
from nbgpu.config.training import TrainConfig
from nbgpu.recipes.lithography.symmetry import NUM_FRINGE, broken_by_mirrors, broken_by_quarter_turns


class LithographyConfig(TrainConfig):
    """Compute the aerial image of a mask by a network that learns a projection lens, and by the lens."""

    IMPLEMENTATION = "nbgpu.recipes.lithography.recipe:Lithography"
    VALIDATION_VALUES = ("loss", "mae", "iou")
    WITHOUT_FILES = ("generated",)
    VOLUME = "mask"
    INPUTS = "masks as .npz, LithoBench's folders, or layouts: .glp, .gds, .oas"
    TRIAL = "320 generated masks, 256 steps: 40 s on 2 CPU cores"
    PREDICTS = "aerial images, and contours of what prints"
    AT_PREDICTION = ("layer", "cell", "resist_threshold", "diffusion_nm")
    UNUSED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("intensity_prob", "intensity_strength"),
            "a mask's value is its transmission and an image's its dose, so that neither can be shifted or scaled alone",
        ),
        "channels_last": "that is for volumes",
        "sdpa": "the network has no attention",
    }
    ONLY_WITH: ClassVar[Rules] = (
        only(one_of("data", "generated"), "num_masks"),
        only(none_of("data", "generated"), "layer", "cell", "split"),
        only(none_of("source", "point", "conventional"), "sigma_inner"),
        only(none_of("source", "point"), "sigma_outer", "source_cells"),
        only(one_of("source", "quadrupole", "quasar", "dipole"), "opening_deg", "source_angle_deg"),
        # The optical kernels are convolved by FFT, in float32 or float64 whatever amp says.
        only(given("corrections"), "amp", "tf32", "cudnn"),
    )
    # An image in a resist is no sum of squares, as an aerial image is: it needs corrections and more steps.
    DEFAULTS_WITH: ClassVar[DefaultRules] = (defaults(one_of("image", "resist"), corrections=4, steps=512),)

    recipe: Literal["lithography"] = "lithography"
    """the recipe"""
    steps: Annotated[int, TrainConfig.model_fields["steps"]] = 256
    batch_size: Annotated[int, TrainConfig.model_fields["batch_size"]] = 4
    data: str = Field(
        "generated",
        min_length=1,
        json_schema_extra=control("Data", "Data") | read_from(*WITHOUT_FILES, several=True),
    )
    """'generated' masks, an .npz with masks (and aerials), a folder as LithoBench has them, or layouts (.glp,
    .gds, .oas, several separated by commas), which are cut into tiles"""
    image: Literal["aerial", "resist"] = Field("aerial", json_schema_extra=control("Data", "Image to learn"))
    """image of a mask that the network learns: 'aerial', the intensity in the resist; or 'resist', what a
    resist makes of it, whose response the network does not know; 'resist' only where images are simulated"""
    num_masks: int = Field(320, ge=2, le=10_000_000)
    """masks generated where data='generated'"""
    size: int = Field(
        64, ge=16, le=4096, json_schema_extra=control("Data", "Edge of the masks", unit="pixels")
    )
    """edge of each mask, in pixels; pictures in files are averaged down to it"""
    pixel_nm: float | None = Field(None, gt=0, le=1000)
    """edge of a pixel at the wafer, in nm, once pictures have been averaged down; left out: 25 for generated
    masks; files need it"""
    layer: str = ""
    """layer of a layout, such as 'M1', '11' or '11/0'; empty for the only one"""
    cell: str = ""
    """cell of a GDSII or OASIS layout, with all that it refers to; empty for the only top cell"""
    wavelength_nm: float = Field(193.0, gt=1, le=1000)
    """wavelength of the light, in nm"""
    numerical_aperture: float = Field(
        0.85, gt=0.01, lt=2, json_schema_extra=control("Optics", "Numerical aperture")
    )
    """numerical aperture (NA) of the lens at the wafer"""
    medium_index: float = Field(1.0, ge=1, le=2)
    """refractive index above the resist: 1 for air, 1.437 for water"""
    source: Literal["point", "conventional", "annular", "quadrupole", "quasar", "dipole"] = Field(
        "annular", json_schema_extra=control("Optics", "Illumination")
    )
    """shape of the illumination"""
    sigma_inner: float = Field(0.4, ge=0, lt=1)
    """inner radius of the source, as a share of NA"""
    sigma_outer: float = Field(0.8, gt=0, le=1)
    """outer radius of the source, as a share of NA"""
    opening_deg: float = Field(40.0, gt=0, le=180)
    """width of each pole of the source, in degrees"""
    source_angle_deg: float = Field(0.0, ge=-360, le=360)
    """angle of the source's poles, in degrees; a dipole lies along x at 0"""
    source_cells: int = Field(15, ge=1, le=201)
    """cells along the source's edge; each one inside its shape is a point"""
    defocus_nm: float = Field(
        0.0, ge=-10_000, le=10_000, json_schema_extra=control("Optics", "Defocus", unit="nm")
    )
    """how far the resist is out of focus, in nm"""
    zernikes: str = Field("", pattern=r"^$|^\d+:[-+]?[0-9.]+(e[-+]?\d+)?(,\d+:[-+]?[0-9.]+(e[-+]?\d+)?)*$")
    """aberrations in waves by Fringe number, such as '5:0.02,8:-0.01'; empty for none"""
    simulated_kernels: int = Field(0, ge=0, le=10_000)
    """kernels (SOCS) that images are simulated with; 0 for every source point (Abbe)"""
    resist_threshold: float | None = Field(None, gt=0, lt=2)
    """intensity above which the resist clears, where a clear mask gives 1; left out: 0.3, and 0.225 for
    LithoBench's folders"""
    diffusion_nm: float = Field(0.0, ge=0, le=1000)
    """standard deviation of the blur in the resist, in nm, before the threshold"""
    num_kernels: int = Field(48, ge=2, le=4096, json_schema_extra=shape_of_model())
    """kernels that the network learns"""
    kernel_nm: float | None = Field(None, gt=0, le=100_000, json_schema_extra=shape_of_model())
    """edge of the learned kernels, in nm; left out: 3.2 wavelengths / NA, and at most the mask's edge"""
    corrections: int = Field(0, ge=0, le=8, json_schema_extra=shape_of_model())
    """dilated convolutions that correct the sum of squares, for images that have more to them than optics"""

    @property
    def pixel(self) -> float:
        """The value of `pixel_nm`, or its default with generated masks."""
        return 25.0 if self.pixel_nm is None else self.pixel_nm

    @property
    def aberrations(self) -> tuple[tuple[int, float], ...]:
        """The aberrations as pairs of (Fringe number, waves)."""
        pairs = (entry.split(":") for entry in self.zernikes.split(",") if entry)
        return tuple((int(number), float(waves)) for number, waves in pairs)

    def problems(self) -> Iterator[str]:
        """Yield a message for each contradiction between settings: pixels too large for the optics, a
        numerical aperture above the medium's index, and augmentations under which the lens is not
        symmetric."""
        if self.data != "generated" and self.pixel_nm is None:
            yield f"data={self.data!r}: the size of a pixel at the wafer is not known. Give pixel_nm"
        if self.sigma_inner >= self.sigma_outer and self.source not in ("point", "conventional"):
            yield f"sigma_inner={self.sigma_inner} must be below sigma_outer={self.sigma_outer}"
        if self.numerical_aperture >= self.medium_index:
            yield (
                f"numerical_aperture={self.numerical_aperture} must be below medium_index={self.medium_index}. For "
                "immersion in water at 193 nm give medium_index=1.437"
            )
        limit_nm = self.wavelength_nm / (4 * self.numerical_aperture)
        if self.pixel > limit_nm:
            yield f"pixel_nm={self.pixel:g} is too large: an image needs wavelength / (4 NA) = {limit_nm:.1f} nm or less"
        numbers = [number for number, _ in self.aberrations]
        wrong = [number for number in numbers if not 1 <= number <= NUM_FRINGE]
        if wrong or len(set(numbers)) < len(numbers):
            yield f"zernikes={self.zernikes!r} must name each number from 1 to {NUM_FRINGE} at most once"
            return
        for name, reasons in {
            "rotate90_prob": broken_by_quarter_turns(self.source, numbers),
            "flip_prob": broken_by_mirrors(self.source, self.source_angle_deg, numbers),
        }.items():
            if getattr(self, name) > 0:
                for reason in reasons:
                    yield f"{name}={getattr(self, name)} would make images that this lens does not: {reason}. Set it to 0"
