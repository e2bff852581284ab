"""A person's own recipe: a file with a dataset, a model and a loss, trained like any other recipe.

    nbgpu new my_recipe                writes such a file
    nbgpu train my_recipe.py           or cluster.train("my_recipe.py") in a notebook

Class attributes with a type are settings: flags, fields of the controls and of run.toml, parameters of a
sweep.
"""

from __future__ import annotations

import glob
import importlib.util
import linecache
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from nbgpu.config import OwnConfig
from nbgpu.engine.data.decoding import Item
from nbgpu.engine.model import randomness
from nbgpu.engine.workload.recipe import CPU, Batch, Identity, Loaders, ParameterGroup, Predicted
from nbgpu.errors import ConfigError, DataError
from nbgpu.machine import interpreter
from nbgpu.planning.epochs import DataAmount
from nbgpu.recipes.own import checks
from nbgpu.recipes.own.data import HeldOut, Reader, as_given, dataset_identity, named

_search_path: list[str] = []
"""The folders that were added to sys.path for the last recipe, so that it can import files beside it."""
_imported: list[str] = []
"""The modules beside the last recipe's file that it has imported. They are imported anew for the next recipe,
because they may have been edited."""
_sources: dict[str, Path] = {}
"""The file that was last run for each recipe, by the setting `recipe`. The Trainer builds a recipe again when
a setting changes, and then runs the same file."""


class OwnRecipe(ABC):
    """The base class of a person's recipe, which must define `dataset`, `model` and `loss`.

    Attributes:
        config: all settings, nbgpu's and those of the class. The latter are also attributes.
        why_losses_differ: a sentence, as a string in the body of the class, that says why the loss of a
            validation is not comparable with that of a training step. If it is given, the charts show it and
            give each of the two losses an axis.
    """

    why_losses_differ = ""

    def __init__(self, config: OwnConfig) -> None:
        self.config = config
        for name in config.OWN:
            setattr(self, name, getattr(config, name))

    @abstractmethod
    def dataset(self) -> Dataset[Any]:
        """Return a dataset of training samples with `__len__` and `__getitem__`. Each sample is a dict or a
        tuple of tensors, arrays or numbers.

        Every rank builds the whole dataset, and reads its share. Without `val_dataset` the share
        `val_fraction` of it is held out. Random augmentations may draw from torch's, NumPy's or Python's
        generators, or be MONAI's transforms: all are seeded for each sample and epoch.
        """

    def val_dataset(self) -> Dataset[Any] | None:
        """Return the held-out samples, if they are a separate dataset."""
        return None

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the network. Every rank initialises it with the same random numbers."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor | Mapping[str, Tensor]:
        """Return the mean loss of a batch, a scalar, or a dict with `loss` and other scalars that are shown
        beside it.

        Args:
            model: the network from `model`, distributed over the ranks: call it, but do not use its parts.
            batch: the stacked samples on the device, as a dict or a tuple like the samples.
        """

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Return scalars, such as an accuracy, as means over a held-out batch. They are shown beside
        `loss`."""
        return {}

    def parameter_groups(self, model: nn.Module) -> Sequence[Mapping[str, Any]]:
        """Return groups of parameters with another learning rate or weight decay than the settings'.

        Each group is a dict with `params`, a list of the model's parameters, and any of `lr_factor`, a factor
        on the learning rate of each step, `weight_decay` and `name`. For all other parameters the settings
        apply.

        Args:
            model: the network from `model`, on the device; with fsdp its parameters are sharded.
        """
        return []

    def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return an optimizer over these groups, such as `torch.optim.RMSprop(groups)`.

        Without this method the optimizer is that of the settings. nbgpu sets the learning rate of each group
        in each step, and saves the optimizer's state in checkpoints.

        Args:
            groups: parameter groups as torch's optimizers take them, with `lr` and `weight_decay`: those of
                `parameter_groups` and one with all other parameters.
        """
        raise NotImplementedError

    def schedule(self, step: int, num_steps: int) -> float:
        """Return the factor on the learning rate in a step, which is counted from 0 to `num_steps` - 1.

        Without this method warm-up and schedule are those of the settings. The factor must depend on the
        arguments alone: it is computed again after a run was resumed or a rank replaced.
        """
        raise NotImplementedError

    def result(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Return results of the trained model by name, at the end of a run: texts, numbers, tensors or arrays
        of a few numbers, and lists and dicts of them. Only rank 0 calls this method."""
        return {}

    def new_data(self, data: str) -> Dataset[Any] | None:
        """Return the samples that `nbgpu predict --data DATA` names, in the form of the samples of `dataset`.

        Without this method the recipe cannot predict.
        """
        return None

    def predict(self, model: nn.Module, batch: Any, stem: Path) -> Mapping[str, Any]:
        """Return the columns of the table of predictions for one sample of `new_data`: numbers and texts.

        Args:
            model: the trained network from `model`, in evaluation mode; no gradients are kept.
            batch: a batch with this sample alone, on the device.
            stem: the path of the sample's files without ending. Files can be written, for example to
                `stem.with_name(stem.name + ".npy")`.
        """
        raise NotImplementedError


class Own:
    """The Recipe that the Trainer uses. It wraps the person's recipe, checks what its methods return, and
    names the parts of samples and losses.

    Args:
        config: the settings, whose `recipe` is the person's file.
        source: the file to run: the copy in the run's folder, so that a replaced rank computes the same. None
            for the file that was run last.
    """

    def __init__(self, config: OwnConfig, source: Path | None = None) -> None:
        """Run the recipe's file and build the person's recipe; the datasets are made when they are first
        needed."""
        self.config = config
        original = Path(config.recipe)
        _sources[config.recipe] = source = source or _sources.get(config.recipe, original)
        # Code at the top of the file may draw random numbers, which must be the same on all ranks.
        with randomness.seeded(config.seed):
            self._own: OwnRecipe = _load(original, source, config.CLASS_NAME)(config)
        _require_visible_methods(type(self._own), config)
        self._code = _Code(original, source, config.seed)
        self._datasets: dict[str, Dataset[Any]] = {}
        """The results of the person's `dataset` and `val_dataset`, by the name of the method; from the first
        use of `_parts` on."""
        self._new: Dataset[Any] | None = None
        """The result of the person's `new_data`."""

    def build_loaders(self, rank: int, world_size: int, device: torch.device = CPU) -> Loaders:
        """Return the loaders of the rank's share of the training samples and of the held-out samples."""
        train, val = self._parts
        reader = Reader(train, self.amount(), self.config, rank, world_size, device, self._code)
        what = "val_dataset" if "val_dataset" in self._datasets else "dataset"
        held_out = HeldOut(val, self.config, rank, world_size, what) if val is not None else ()
        return Loaders(
            train=reader,
            val=held_out,
            steps_per_epoch=reader.steps_per_epoch,
            seek=reader.seek,
            close=reader.close,
            summary=reader.summary,
            identity=self._identity,
        )

    def amount(self) -> DataAmount:
        """Return the numbers of training and held-out samples; each counts as a volume with one sample."""
        train, val = self._parts
        return DataAmount(len(train), 1, 0 if val is None else len(val))  # type: ignore[arg-type]

    def build_model(self) -> nn.Module:
        return checks.model(self._own.model(), self._own.model)

    def example(self, batch_size: int) -> Batch:
        """Return a batch of random numbers, or of zeros for integers, with the shapes of the first sample."""
        return {
            name: (torch.rand if dtype.is_floating_point else torch.zeros)((batch_size, *shape), dtype=dtype)
            for name, (shape, dtype) in self._shapes.items()
        }

    @cached_property
    def _shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each part of the first training sample."""
        return {name: (tuple(part.shape), part.dtype) for name, part in named(self._parts[0][0]).items()}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the model's direct children that share no weight with another child. torch's fully_shard
        requires tied weights in one block, so children with tied weights are left to the root module."""
        weights = {child: list(child.parameters()) for child in model.children()}
        num_uses = Counter(chain(*weights.values(), model.parameters(recurse=False)))
        return [
            child
            for child, child_weights in weights.items()
            if child_weights and all(num_uses[weight] == 1 for weight in child_weights)
        ]

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        return checks.parameter_groups(self._own.parameter_groups(model), model, self._own.parameter_groups)

    def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer | None:
        """Return the optimizer of the person's recipe; None if the recipe has none."""
        # METHODS has the names of the methods that the person's class itself defines.
        if "optimizer" not in self.config.METHODS:
            return None
        # An optimizer may change the dicts that it gets; the check compares its groups with unchanged ones.
        copies = [dict(group) for group in groups]
        return checks.optimizer(self._own.optimizer(copies), groups, self._own.optimizer)

    def schedule(self, step: int, num_steps: int) -> float | None:
        """Return the learning-rate factor of the person's schedule; None if the recipe has none."""
        if "schedule" not in self.config.METHODS:
            return None
        return checks.factor(self._own.schedule(step, num_steps), step, self._own.schedule)

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return checks.losses(self._own.loss(model, as_given(batch)), self._own.loss)

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the losses and metrics of a batch by name, (N,): each mean is repeated for the N samples."""
        values = {**self.loss(model, batch), **self._own.metrics(model, as_given(batch))}
        num_samples = len(next(iter(batch.values())))
        return {name: torch.as_tensor(value).detach().expand(num_samples) for name, value in values.items()}

    def result(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        return checks.result(self._own.result(model, device), self._own.result)

    def new_samples(self, data: str) -> tuple[Sequence[Item], list[str]]:
        """Return an Item for each sample of the recipe's `new_data`, and no problems.

        Raises:
            ConfigError: the recipe does not define `new_data` and `predict`.
        """
        cls = type(self._own)
        missing = [name for name in ("new_data", "predict") if getattr(cls, name) is getattr(OwnRecipe, name)]
        if missing:
            raise ConfigError(
                f"{self.config.recipe}: to predict, define {' and '.join(missing)}: new_data(self, data) returns a dataset of "
                "new samples, and predict(self, model, batch, stem) what is to be in the table for one of them"
            )
        with randomness.seeded(self.config.split_seed):
            self._new = dataset = checks.dataset(self._own.new_data(data), self._own.new_data)
        num_samples = len(dataset)  # type: ignore[arg-type]
        return [{"name": f"sample {index}", "index": index} for index in range(num_samples)], []

    def predict(self, model: nn.Module, device: torch.device, sample: Item, stem: Path) -> Predicted:
        """Call the recipe's `predict` for a sample; return the columns and the files that it wrote."""
        assert self._new is not None
        parts = named(self._new[sample["index"]])
        batch = {name: part[None].to(device) for name, part in parts.items()}
        with randomness.seeded(self.config.seed):
            values = self._own.predict(model, as_given(batch), stem)
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{self.config.recipe}: `predict` must return a dict of numbers and texts, not {type(values).__name__}"
            )
        columns = {
            str(name): value.item() if hasattr(value, "item") else value for name, value in values.items()
        }
        # `predict` does not return the names of its files: all files whose names begin with the stem are its.
        return Predicted(columns, sorted(stem.parent.glob(f"{glob.escape(stem.name)}.*")))

    def _identity(self) -> dict[str, Identity]:
        """Return the length and digests of some samples of each dataset, by which the ranks notice that their
        datasets differ."""
        return {
            f"`{what}`": dataset_identity(dataset, self.config, what)
            for what, dataset in self._datasets.items()
        }

    @cached_property
    def _parts(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        """The training samples, and the held-out samples or None. The first use builds the datasets."""
        # With a seed, a dataset that is shuffled or drawn is the same on all ranks, even on a replaced one.
        with randomness.seeded(self.config.split_seed):
            dataset = checks.dataset(self._own.dataset(), self._own.dataset)
            val_dataset = self._own.val_dataset()
        self._datasets = {"dataset": dataset}
        if val_dataset is not None:
            self._datasets["val_dataset"] = val_dataset = checks.dataset(val_dataset, self._own.val_dataset)
        num_samples = len(dataset)  # type: ignore[arg-type]
        if num_samples == 0:
            raise DataError(f"{self.config.recipe}: the dataset has no samples")
        num_held_out = round(self.config.val_fraction * num_samples) if val_dataset is None else 0
        if num_held_out == 0 or num_samples < 2:
            return dataset, val_dataset
        generator = torch.Generator().manual_seed(self.config.split_seed)
        order = torch.randperm(num_samples, generator=generator).tolist()
        held_out = sorted(order[: min(num_held_out, num_samples - 1)])
        return Subset(dataset, sorted(order[len(held_out) :])), Subset(dataset, held_out)


def _require_visible_methods(cls: type[OwnRecipe], config: OwnConfig) -> None:
    """Raise ConfigError if the person's class inherits `optimizer` or `schedule` from another class: the
    settings are read from the text of the class, which does not show inherited methods."""
    hidden = [
        name
        for name in ("optimizer", "schedule")
        if callable(method := getattr(cls, name))
        and method is not getattr(OwnRecipe, name)
        and name not in config.METHODS
    ]
    if hidden:
        owners = {name: next(base for base in cls.__mro__ if name in vars(base)) for name in hidden}
        lines = " and ".join(f"`{name} = {base.__name__}.{name}`" for name, base in owners.items())
        raise ConfigError(
            f"{config.recipe}: {cls.__name__} has {' and '.join(f'`{name}`' for name in hidden)} from another class, and nbgpu "
            f"reads its settings off the text of {cls.__name__}. Write {lines} into it"
        )


class _Code:
    """A recipe's file as a picklable object, which runs the file when it is unpickled in a worker process.

    Without it, a worker would import the copy in the run's folder, and tracebacks would name that copy
    instead of the person's file.
    """

    def __init__(self, original: Path, source: Path, seed: int) -> None:
        self._original = original
        self._source = source
        self._seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _run_in_worker, (self._original, self._source, self._seed)


def _run_in_worker(original: Path, source: Path, seed: int) -> _Code:
    """Run the recipe's file in a worker process that unpickles a `_Code`. The `_Code` is pickled before the
    dataset, so that the classes of the dataset exist when the dataset is unpickled."""
    if original.stem not in sys.modules:
        with randomness.seeded(seed):
            _run(original.stem, original, source)
    return _Code(original, source, seed)


def _load(original: Path, source: Path, class_name: str) -> type[OwnRecipe]:
    """Run a recipe's file and return its class.

    The folders and modules of the previous recipe are first removed from sys.path and sys.modules, so that
    edited modules beside the file are imported again.

    Raises:
        ConfigError: another module has the file's name, or the file no longer defines the class.
    """
    name = original.stem
    existing = sys.modules.get(name)
    if existing is not None and Path(getattr(existing, "__file__", None) or "").name != original.name:
        raise ConfigError(f"{original}: a module {name!r} is there already. Give the file another name")
    for path in _search_path:
        if path in sys.path:
            sys.path.remove(path)
    for imported in _imported:
        sys.modules.pop(imported, None)
    _search_path[:] = dict.fromkeys([str(source.parent), str(original.parent)])
    interpreter.look_in(_search_path)
    before = set(sys.modules)
    module = _run(name, original, source)
    new_modules = set(sys.modules) - before
    _imported[:] = [new for new in new_modules if _is_local_module(original.parent, sys.modules[new])]
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, OwnRecipe)):
        raise ConfigError(f"{source}: {class_name} is not there any more once the file has been run")
    return cls


def _is_local_module(folder: Path, module: ModuleType) -> bool:
    """Return whether a module is a file in this folder, but not in a Python environment inside it."""
    file = Path(getattr(module, "__file__", None) or "/")
    if not file.is_relative_to(folder):
        return False
    return not {"site-packages", "nbgpu"} & set(file.relative_to(folder).parts)


def _run(name: str, original: Path, source: Path) -> ModuleType:
    """Run the text of `source` as the module `name`, as if it were in the file `original`.

    Tracebacks, the debugger and `__file__` name the original file, and show the lines that were run, even if
    the file was edited since.
    """
    shown_as = str(original.absolute())
    text = source.read_bytes()
    lines = importlib.util.decode_source(text).splitlines(keepends=True)
    # An entry without a modification time is never compared with the file.
    linecache.cache[shown_as] = (len(text), None, lines, shown_as)
    spec = importlib.util.spec_from_file_location(name, shown_as)
    assert spec is not None, "the name ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile(text, shown_as, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
