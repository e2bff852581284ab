"""The settings of the recipe survival."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator

from nbgpu.config.conditions import DefaultRules, Rules, defaults, left_out, none_of, one_of, only
from nbgpu.config.settings import control, divides_the_data, read_from, shape_of_model, steered
from nbgpu.config.training import TrainConfig

Role = Literal["image", "time", "event", "patient"]
"""The meaning of a column of the table."""


class SurvivalConfig(TrainConfig):
    """Predict from a volume how soon an event is to be expected: a 3D ResNet, Cox's partial likelihood."""

    IMPLEMENTATION = "nbgpu.recipes.survival.recipe:Survival"
    VALIDATION_VALUES = ("loss", "c_index")
    WITHOUT_FILES = ("generated",)
    INPUTS = (
        "a CSV list of NIfTI volumes with time, event, and folds and numbers if there are some; 'generated'"
    )
    TRIAL = (
        "1400 generated patients, 1000 of them trained on, 1200 steps: two to three minutes on 2 CPU cores"
    )
    PREDICTS = "a table of risks, risk groups and probabilities of survival"
    AT_PREDICTION = ("columns", "eval_times", "risk_groups")
    FROM_DATA = ("image_size",)

    UNUSED: ClassVar[Mapping[str, str]] = {"sdpa": "the network has no attention"}
    ONLY_WITH: ClassVar[Rules] = (
        only(one_of("data", "generated"), "num_patients"),
        only(
            none_of("data", "generated"), "fold", "split", "features", "columns", "check_time_unit", "spacing"
        ),
        only(left_out("fold"), "val_fraction", "test_fraction", "split"),
        only(left_out("replace_rate"), "spread_events"),
    )
    # These values are from MACE's guide. The defaults of the fields are for a small network on generated
    # patients.
    DEFAULTS_WITH: ClassVar[DefaultRules] = (
        defaults(
            none_of("data", "generated"),
            epochs=50,
            lr=1e-4,
            weight_decay=1e-5,
            ema_decay=0.0,
            val_every_epochs=1,
        ),
    )

    recipe: Literal["survival"] = "survival"
    """the recipe"""
    steps: Annotated[int, TrainConfig.model_fields["steps"]] = 1200
    batch_size: int = Field(16, ge=1, le=4096, json_schema_extra=control("Run") | steered("epoch"))
    """samples for each rank and micro-batch; those of all ranks are compared with one another"""
    lr: Annotated[float, TrainConfig.model_fields["lr"]] = 2e-3
    weight_decay: Annotated[float, TrainConfig.model_fields["weight_decay"]] = 1.0
    ema_decay: float = Field(0.98, ge=0, lt=1, json_schema_extra=control("Optimizer"))
    """share that each step keeps of an average of the weights over the steps; validation and result then use
    the average, and checkpoints have both; 0 for no average"""
    rotate90_prob: Annotated[float, TrainConfig.model_fields["rotate90_prob"]] = 0.5
    flip_prob: Annotated[float, TrainConfig.model_fields["flip_prob"]] = 0.5
    intensity_prob: Annotated[float, TrainConfig.model_fields["intensity_prob"]] = 0.5
    intensity_strength: Annotated[float, TrainConfig.model_fields["intensity_strength"]] = 0.05
    sync_batchnorm: bool = True
    """BatchNorm layers normalise over all ranks: scores are compared, and so all ranks have to normalise
    alike"""
    data: str = Field(
        "generated", min_length=1, json_schema_extra=control("Data", "Data") | read_from(*WITHOUT_FILES)
    )
    """'generated' patients, or a CSV file with 'NIFTI path' (or 'image', 'path'), 'time' and 'event'"""
    fold: str = Field("", json_schema_extra=control("Data", "Column of the parts") | divides_the_data())
    """column of the CSV file that says 'train', 'val' or 'test', such as 'Fold_1'; empty to hold out
    val_fraction"""
    columns: tuple[str, ...] = Field((), json_schema_extra=control("Data", "Other names of columns"))
    """headings of the CSV file's columns where they have other names, such as 'time=OS_days',
    'event=OS_status', 'image=ct_path', 'patient=case'"""
    check_time_unit: bool = True
    """refuse a CSV file whose times have a gap of more than ten times, as if some were in days and some in
    years"""
    features: tuple[str, ...] = Field(
        (), json_schema_extra=control("Data", "Columns of features") | shape_of_model()
    )
    """columns of the CSV file with numbers that go to the last layer beside the volume, such as 'Age'"""
    val_fraction: float = Field(0.2857, ge=0, lt=1, json_schema_extra=divides_the_data())
    """share of the patients held out for validation"""
    spread_events: bool = Field(True, json_schema_extra=control("Data", "Spread events evenly"))
    """spread the patients with the event evenly over the ranks and, in each epoch, over the micro-batches: a
    micro-batch without an event teaches nothing"""
    num_patients: int = Field(1400, ge=4, le=10_000_000)
    """patients generated where data='generated'"""
    image_size: tuple[int, ...] = Field(
        (), json_schema_extra=control("Data", "Size of the volumes", unit="voxels")
    )
    """voxels that volumes are resized to, such as 256 256 64; left out: 24 24 16 for generated volumes; for
    files the median of their shapes, made smaller until a batch fits into the memory"""
    spacing: tuple[float, ...] = Field((), json_schema_extra=control("Data", "Voxel size", unit="mm"))
    """voxel size in mm to which volumes are resampled, one number or three (right, front, top), such as 1.5;
    their middle of image_size voxels is then taken, filled up where they are smaller; left out: volumes are
    resized to image_size, whatever the size of their voxels"""
    hu_min: float = Field(-1000.0, ge=-1e6, le=1e6)
    """Hounsfield units that become 0, as do all values below"""
    hu_max: float = Field(1000.0, ge=-1e6, le=1e6)
    """Hounsfield units that become 1, as do all values above"""
    resnet: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = Field(
        "resnet18", json_schema_extra=control("Model", "Network") | shape_of_model()
    )
    """MONAI's 3D ResNet"""
    widen_factor: float | None = Field(None, gt=0, le=8, json_schema_extra=shape_of_model())
    """factor on the 64 channels of the network's first stage; left out: 0.25 for generated volumes, else 1"""
    stem_stride: Literal[1, 2] = 2
    """stride of the first convolution; 2 as MedicalNet has it, 1 takes eight times the memory"""
    pretrained: str = Field("", json_schema_extra=control("Model", "Pretrained weights") | read_from())
    """file with the ResNet's weights, .safetensors or of torch.save, such as MedicalNet's; empty for none"""
    freeze_epochs: int = Field(
        0, ge=0, le=1_000_000, json_schema_extra=control("Model", "Freeze the network for", unit="epochs")
    )
    """epochs at the beginning in which the last layer learns and the ResNet does not"""
    encoder_lr_factor: float = Field(
        1.0,
        gt=0,
        le=10,
        json_schema_extra=control("Model", "Learning rate of the network", unit="times") | steered("step"),
    )
    """factor on the learning rate of the ResNet's weights, such as 0.1 for pretrained ones; the last layer
    learns at lr"""
    ties: Literal["efron", "breslow"] = "efron"
    """how the partial likelihood treats events at the same time"""
    eval_times: tuple[float, ...] = ()
    """times, in the data's unit, for which the result says how good predictions are; left out: the quartiles
    of the events' times"""
    risk_groups: int = Field(3, ge=2, le=8)
    """groups of equal size among the training patients whose curves are drawn"""

    @property
    def volume_shape(self) -> tuple[int, int, int]:
        """The value of `image_size`, or its default for generated patients. For files, `image_size` is chosen
        before this is read."""
        first, second, third = self.image_size or (24, 24, 16)
        return first, second, third

    @property
    def headings(self) -> dict[Role, str]:
        """The value of `columns` as headings by role."""
        given = dict(entry.split("=", 1) for entry in self.columns if "=" in entry)
        return {role: given[role].strip() for role in get_args(Role) if given.get(role, "").strip()}

    @field_validator("spacing", mode="before")
    @classmethod
    def _one_number_is_a_spacing(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @property
    def spacing_mm(self) -> tuple[float, ...]:
        """The value of `spacing` for each of three axes; empty where it is left out."""
        return self.spacing * 3 if len(self.spacing) == 1 else self.spacing

    @property
    def widening(self) -> float:
        """The value of `widen_factor`, or its default where it is left out."""
        if self.widen_factor is not None:
            return self.widen_factor
        return 0.25 if self.data == "generated" else 1.0

    @property
    def why_losses_differ(self) -> str:
        """Return the sentence for the charts: the partial likelihood depends on the number of patients at
        risk."""
        return (
            "The loss grows with the number of patients at risk: in a step those of the batch, in a validation all who "
            "are held out. Compare the C-index."
        )

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid value, and for each contradiction between settings of the volumes,
        the network and its frozen epochs."""
        if self.image_size and (
            len(self.image_size) != 3 or not all(8 <= n <= 1024 for n in self.image_size)
        ):
            yield f"image_size={self.image_size} must be three numbers from 8 to 1024"
        elif (
            self.batch_size == 1 and not self.left_to_data and max(self.volume_shape) <= 16 * self.stem_stride
        ):
            yield (
                f"batch_size=1 leaves one value in the last stage of volumes of {self.volume_shape}, and BatchNorm needs two. "
                "Take batch_size=2"
            )
        if len(self.spacing) not in (0, 1, 3) or not all(0.05 <= mm <= 100 for mm in self.spacing):
            yield f"spacing={self.spacing} must be one number or three, from 0.05 to 100 mm"
        if self.hu_min >= self.hu_max:
            yield f"hu_min={self.hu_min:g} must be below hu_max={self.hu_max:g}"
        if len(set(self.features)) < len(self.features):
            yield f"features={self.features} names one twice"
        if len(self.headings) < len(self.columns):
            yield f"columns={self.columns} must be entries such as 'time=OS_days', each of {', '.join(get_args(Role))} once"
        if self.widening * 64 < 1:
            yield f"widen_factor={self.widen_factor} leaves no channels; give 1/64 or more"
        if min(self.eval_times, default=1.0) <= 0 or list(self.eval_times) != sorted(set(self.eval_times)):
            yield f"eval_times={self.eval_times} must be above 0 and rise"
        if self.freeze_epochs and self.strategy == "ddp" and not self.find_unused_parameters:
            yield (
                f"freeze_epochs={self.freeze_epochs} needs find_unused_parameters=True: DDP waits for gradients that the "
                "frozen part does not give"
            )
        if self.freeze_epochs and self.strategy == "fsdp":
            yield f"freeze_epochs={self.freeze_epochs} does not go with strategy='fsdp'. Take 'ddp'"
        if self.freeze_epochs and self.static_graph:
            yield "static_graph does not go with freeze_epochs: other parameters learn after them. Leave one out"
