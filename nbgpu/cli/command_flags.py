"""The flags of each command; the classes here are those that are not settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig, flags
from nbgpu.config.characterization import MEASURING, CharacterizeConfig
from nbgpu.config.prediction import PredictConfig
from nbgpu.config.settings import unused
from nbgpu.exports.settings import ExportConfig
from nbgpu.planning import studies
from nbgpu.planning.studies import StudyConfig
from nbgpu.planning.trials import SweepConfig
from nbgpu.recipes.microstructure.config import MicrostructureConfig


class FileFlag(BaseModel):
    """The flag of every command that takes settings from a file."""

    config: str = ""
    """TOML file, such as a run's run.toml, whose values are the defaults of the other flags; or a JSON or
    YAML file that `nbgpu convert` takes"""
    environment_file: str = ""
    """the environment.json that belongs to the config.json of MONAI's tutorial 3d_ldm"""
    preset: str = ""
    """a set of values, such as demo, that are the defaults of the other flags, and of what --config leaves
    out; `nbgpu recipes` lists them"""


class TrainFlags(FileFlag):
    """The flags of `nbgpu train` that are no settings."""

    plan: Annotated[bool, flags.SWITCH] = False
    """say what the run would do and take, and do not train"""
    find_batch_size: Annotated[bool, flags.SWITCH] = False
    """find the largest batch that fits, by trying, and take it as batch_size"""


class StudyFlags(FileFlag):
    """The flags of `nbgpu scaling` that are no settings."""

    ranks: str = "1,2"
    """numbers of ranks to measure, such as 1,2,4; with --vary one number"""
    vary: str = ""
    """a setting of the recipe to vary in place of the number of ranks, such as bucket-mb"""
    values: str = ""
    """the values of that setting, such as 1,5,25"""


class ConvertFlags(BaseModel):
    """Turn another tool's configuration files into a TOML file for --config."""

    out: str = ""
    """the TOML file to write; empty to print it"""
    data: str = ""
    """the data to train on, in place of what the files say"""
    perceptual_network: str = ""
    """a local file of weights for the autoencoder's perceptual distance"""


class ExportFlags(BaseModel):
    """The flag of `nbgpu export` that is no setting."""

    to: str = "torchrun"
    """format: torchrun, slurm, or on Kubernetes job, jobset or trainjob (Kubeflow Trainer)"""


def fields_of(command: str, recipe: str | None = None) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (name, field) of the flags of a command, in order.

    Args:
        command: the name of the command. A command without settings has no flags here.
        recipe: the recipe after the command; None for the flags that all recipes have.
    """
    model = TRAIN_CONFIGS[recipe] if recipe else TrainConfig
    models: dict[str, list[type[BaseModel]]] = {
        "train": [TrainFlags, ClusterConfig, model],
        "sweep": [FileFlag, SweepConfig, ClusterConfig, model],
        "scaling": [StudyFlags, StudyConfig, ClusterConfig, model],
        "predict": [PredictConfig, ClusterConfig],
        "result": [ClusterConfig],
        "characterize": [CharacterizeConfig, MicrostructureConfig],
        "convert": [ConvertFlags],
        "export": [ExportFlags, ExportConfig],
    }
    left_out = {"recipe", *unused(model), *(studies.DECIDED if command == "scaling" else ())}
    if command == "characterize":
        left_out |= {*MicrostructureConfig.model_fields} - {*MEASURING, *CharacterizeConfig.model_fields}
    fields: dict[str, FieldInfo] = {}
    for group in models.get(command, []):
        for name, info in group.model_fields.items():
            if name not in left_out:
                fields.setdefault(name, info)
    yield from fields.items()
