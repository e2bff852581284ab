"""The recipe: a network that removes noise from one modality of a brain, given the other three."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from monai.networks.nets import DiffusionModelUNet
from monai.transforms import Compose, Transform
from torch import Tensor, nn

from nbgpu.engine.data import inspection
from nbgpu.engine.data.decoding import Decode, Item, opened, raise_together
from nbgpu.engine.data.loader import SampleLoader
from nbgpu.engine.data.parts import Parts, split
from nbgpu.engine.data.sampling import Draw, augmentation
from nbgpu.engine.model import randomness
from nbgpu.engine.model.precision import at_least_float32
from nbgpu.engine.workload.recipe import CPU, Batch, Loaders, Predicted
from nbgpu.errors import DataError
from nbgpu.planning.epochs import DataAmount
from nbgpu.recipes import side_by_side, verdict
from nbgpu.recipes.diffusion import files, prediction
from nbgpu.recipes.diffusion.baselines import VoxelwiseQuadratic
from nbgpu.recipes.diffusion.config import DiffusionConfig
from nbgpu.recipes.diffusion.files import MODALITIES, Case, Cube
from nbgpu.recipes.diffusion.measures import masked_psnr_db, mean_over_cases, quality, unit
from nbgpu.recipes.diffusion.phantoms import phantom
from nbgpu.recipes.diffusion.schedules import Sampler, antithetic
from nbgpu.recipes.side_by_side import Colours

_MAX_BASELINE_VOXELS = 2**24
"""The largest number of voxels of the training cases to which baselines are fitted."""
_NUM_PICTURES = 6
_INTENSITY = Colours("intensity, scaled", -1, 1)
_ERROR = Colours("absolute error", 0, 1)
ONCE = "the network asked once"
"""The baseline that shows how much the steps of sampling improve on a single one."""
_SLICE = "middle slice"
"""The key of a sampled image's middle slice among the measures of its case."""


class Diffusion:
    """Trains MONAI's DiffusionModelUNet with the mean squared error of its prediction.

    Data (`config.data`): generated heads, or a folder of BraTS (`files`). Whole patients are held out.
    """

    def __init__(self, config: DiffusionConfig) -> None:
        self.config = config
        self.sampler = Sampler(config)
        self._times: dict[torch.device, Tensor] = {}
        """The times that the network is trained for, (T,) on each device that has used them."""

    # ---- data ----

    def build_loaders(self, rank: int, world_size: int, device: torch.device = CPU) -> Loaders:
        """Return the rank's volumes: `condition` (batch_size, 3, e, e, e), `target` (batch_size, 1, e, e, e),
        from -1 to 1.

        Raises:
            DataError: a line for every problem of the files, with `check_voxels` also of their voxels.
        """
        config = self.config
        self._inspect(rank, world_size, are_read_anyhow=inspection.are_read_anyhow(config))
        parts = self.parts()
        batches = []
        num_cases = config.num_evaluated(min(len(parts.validation), config.val_cases))
        numbers = range(num_cases)[rank::world_size]
        for start in range(0, len(numbers), config.batch_size):
            chosen = numbers[start : start + config.batch_size]
            data = self.decoded([parts.validation[number] for number in chosen], with_masks=True)
            batch = {name: data[name] for name in ("condition", "target", "brain")}
            batches.append({**batch, "number": torch.tensor(list(chosen))})
        both = ("condition", "target")
        draw = Draw(both, augment=augmentation(config, both, (config.edge,) * 3))
        loaders = SampleLoader(
            parts, self._steps(), draw, config, rank=rank, world_size=world_size, device=device
        ).loaders(batches)
        if config.antithetic and config.samples_per_step(world_size) == 1:
            alone = "antithetic has no effect: a step has one sample, and pairs take two. Raise accumulate"
            return replace(loaders, warnings=(*loaders.warnings, alone))
        return loaders

    def amount(self) -> DataAmount:
        """Return the amount of data; only names and headers of files are read."""
        return self.parts().amount()

    def parts(self) -> Parts:
        """Return the cases of each part of the data, where all cases of a patient are in the same part.

        Raises:
            DataError: a line for each bad name and header.
        """
        config = self.config
        if config.data == "phantoms":
            return split([{"name": f"head {i}", "generated": i} for i in range(config.num_phantoms)], config)
        cases, problems = self._cases
        if problems:
            raise DataError("\n".join(problems))
        in_order = sorted(cases, key=lambda case: case.patient)
        return split([as_item(case) for case in in_order], config, lambda item: _case(item).patient)

    @cached_property
    def _cases(self) -> tuple[list[Case], list[str]]:
        """The cases in the folder `config.data`, and a line for each problem of names and headers."""
        return files.find_cases(Path(self.config.data).expanduser())

    def inspect(self) -> None:
        """Read all files completely; DataError has a line for each unusable one."""
        self._inspect(rank=0, world_size=1, are_read_anyhow=False)

    def _inspect(self, rank: int, world_size: int, are_read_anyhow: bool) -> None:
        """Raise DataError for bad names and headers, and for bad voxels in the rank's share of the cases,
        which are all read here.

        Args:
            rank, world_size: this rank, and the number of ranks that share the cases.
            are_read_anyhow: whether loading the data reads every file and reports bad voxels; nothing is read
                here then.
        """
        if self.config.data == "phantoms":
            return
        cases, problems = self._cases
        # With bad names or headers the data are not loaded. The voxels of the other cases are then checked
        # here, so that one message has all problems.
        if problems or not are_read_anyhow:
            items = [as_item(case) for case in cases[rank::world_size]]
            problems = problems + inspection.problems(self.config, items, Compose([_Look()]))
        if problems:
            raise DataError("\n".join(problems))

    def _steps(self, with_masks: bool = False) -> Compose:
        """Return the transform that decodes a case's Item, as the loaders take it."""
        return Compose([self._prepare(with_masks)])

    def _prepare(self, with_masks: bool = False) -> _Prepare:
        config = self.config
        return _Prepare(config.target, config.edge, config.fit, config.split_seed, with_masks)

    def decoded(self, items: Sequence[Item], with_masks: bool = False) -> dict[str, Tensor]:
        """Decode N >= 1 cases into one batch: `condition` (N, 3, e, e, e), and `target` (N, 1, e, e, e) if
        all cases have one; with masks also `brain` and `label`, in the shape of `target`. For a case without
        a segmentation the label is 0 everywhere."""
        decode = Decode(self._steps(with_masks))
        decoded = [decode(item) for item in items]
        raise_together(decode.failures)
        cases = [dict(opened(one)) for one in decoded]
        for case in cases:
            if "brain" in case:
                case.setdefault("label", torch.zeros_like(case["brain"]))
        all_names = ("condition", "brain", "target", "label")
        names = [name for name in all_names if all(name in case for case in cases)]
        return {name: torch.stack([case[name] for case in cases]) for name in names}

    # ---- model and loss ----

    def build_model(self) -> nn.Module:
        """Return MONAI's DiffusionModelUNet; its first input channel is the noisy image, the others are the
        condition."""
        config = self.config
        edges = [config.edge // 2**level for level in range(len(config.channels))]
        return DiffusionModelUNet(
            spatial_dims=3,
            in_channels=len(MODALITIES),
            out_channels=1,
            channels=config.channels,
            num_res_blocks=(config.num_res_blocks,) * len(config.channels),
            attention_levels=[edge in config.attention_edges for edge in edges],
            norm_num_groups=config.norm_groups,
            num_head_channels=config.norm_groups,
            use_flash_attention=True,
        )

    def example(self, batch_size: int) -> Batch:
        """Return uniform noise: `condition` (N, 3, e, e, e) and `target` (N, 1, e, e, e), from -1 to 1."""
        cube = (self.config.edge,) * 3
        return {
            "condition": torch.rand(batch_size, len(MODALITIES) - 1, *cube) * 2 - 1,
            "target": torch.rand(batch_size, 1, *cube) * 2 - 1,
        }

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks that halve or double the resolution, and the middle block."""
        assert isinstance(model, DiffusionModelUNet)
        return [*model.down_blocks, model.middle_block, *model.up_blocks]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss`, the mean squared error of the prediction at random times."""
        config, clean = self.config, batch["target"]
        device, count = clean.device, len(clean)
        if device not in self._times:
            sampled = config.train_times == "sampled"
            times = self.sampler.times if sampled else torch.arange(config.num_times)
            self._times[device] = times.to(device)
        times = self._times[device]
        if config.antithetic:
            t = times[antithetic(count, len(times), randomness.place(), device)]
        else:
            t = times[torch.randint(len(times), (count,), device=device)]
        epsilon = torch.randn_like(clean)
        return {"loss": self._errors(model, batch, clean, epsilon, t).mean()}

    def _errors(self, model: nn.Module, batch: Batch, clean: Tensor, epsilon: Tensor, t: Tensor) -> Tensor:
        """Return the squared errors (N, 1, D, H, W) of the network's prediction from the noisy image x_t.

        Args:
            model: the network.
            batch: has the `condition`, (N, 3, D, H, W).
            clean: the clean images x0, (N, 1, D, H, W).
            epsilon: standard normal noise of the same shape.
            t: the time of each sample, (N,).
        """
        noise = self.sampler.noise
        x_t = noise.add(clean, epsilon, t)
        predicted = at_least_float32(model(torch.cat([x_t, batch["condition"]], dim=1), t))
        return (predicted - noise.target(self.config.prediction, clean, epsilon, t)).square()

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss`, with a noise and a time that are fixed for each case, and `psnr_db` of the sampled
        image over the brain; (N,) each."""
        numbers = batch["number"].long().tolist()
        _, epsilon, t = self.sampler.noisy(batch["target"], numbers)
        errors = self._errors(model, batch, batch["target"], epsilon, t)
        sampled = self.sampler(model, batch["condition"], numbers)
        cases = zip(unit(sampled), unit(batch["target"]), batch["brain"] > 0, strict=True)
        return {
            "loss": errors.flatten(1).mean(dim=1),
            "psnr_db": torch.stack([masked_psnr_db(*case) for case in cases]),
        }

    # ---- result ----

    def samples_of_result(self) -> Sequence[int]:
        """Return the numbers of the held-out cases that the result is about."""
        return range(self.config.num_evaluated(min(len(self.parts().reported), 2 * self.config.val_cases)))

    def evaluate(
        self, model: nn.Module, device: torch.device, samples: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Return for each case the measures of the sampled image ('diffusion') and of the network's estimate
        from pure noise in a single step (ONCE). The first cases also have the middle slice (D, H) of the
        sampled image, for the pictures.
        """
        held_out = self.parts().reported
        data = self.decoded([held_out[number] for number in samples], with_masks=True)
        sampled = {
            name: self._sampled(model, device, data["condition"], samples, stop_at)
            for name, stop_at in (("diffusion", 0), (ONCE, len(self.sampler.times) - 1))
        }
        measures = [
            quality(images, data["target"], data["brain"], data.get("label")) for images in sampled.values()
        ]
        rows: list[dict[str, Any]] = [
            dict(zip(sampled, row, strict=True)) for row in zip(*measures, strict=True)
        ]
        # The slices are returned with the measures, so that rank 0 need not sample again for the pictures
        # while the other ranks wait.
        for number, row, image in zip(samples, rows, sampled["diffusion"], strict=True):
            if number < _NUM_PICTURES:
                row[_SLICE] = image[0, ..., self.config.edge // 2].tolist()
        return rows

    def _sampled(
        self,
        model: nn.Module,
        device: torch.device,
        condition: Tensor,
        numbers: Sequence[int],
        stop_at: int = 0,
    ) -> Tensor:
        """Sample images (N, 1, e, e, e) for conditions (N, 3, e, e, e), in float32 on the CPU. The noise of a
        case follows from its number. Sampling visits the times of `self.sampler.times` from the largest one
        down to that with the index `stop_at`."""
        dtype = next(model.parameters()).dtype
        return self.sampler(model, condition.to(device, dtype), list(numbers), stop_at).float().cpu()

    def result(
        self,
        model: nn.Module,
        device: torch.device,
        evaluated: Sequence[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Return the `quality` of sampled images of held-out cases and of baselines: `table`, `cases`, `note`
        and `images`. `evaluated` is what `evaluate` returned for `samples_of_result`.

        The baselines are the network evaluated once, at the latest time, where the noisy image says nothing
        and only the other modalities do; and two methods without a network."""
        config = self.config
        parts = self.parts()
        numbers = self.samples_of_result()
        held_out = parts.reported[: len(numbers)]
        if not held_out:
            return {"table": {}, "note": "Nothing was held out (val_fraction=0): no result.", "images": {}}
        if evaluated is None:
            chunks = [numbers[i : i + config.batch_size] for i in range(0, len(numbers), config.batch_size)]
            evaluated = [row for chunk in chunks for row in self.evaluate(model, device, chunk)]
        data = self.decoded(held_out, with_masks=True)
        rows = {name: [row[name] for row in evaluated] for name in ("diffusion", ONCE)}
        for name, output in self._baselines(parts.training, data["condition"]).items():
            rows[name] = quality(output, data["target"], data["brain"], data.get("label"))
        table = {name: mean_over_cases(of_cases) for name, of_cases in rows.items()}
        note = (
            f"On {len(held_out)} held-out cases, over the brain, {config.target} in {len(self.sampler.times)} steps "
            f"{_compare_with_best(table, rows)}. Values go from -1 to 1, and PSNR and SSIM are for that range; spectrum_db "
            "is how far its frequencies are from the true ones, so that less is better."
            + parts.in_words(config)
        )
        cases = {str(item["name"]): row for item, row in zip(held_out, rows["diffusion"], strict=True)}
        return {
            "table": table,
            "cases": cases,
            "note": note,
            "images": self._pictures(data, torch.tensor([row[_SLICE] for row in evaluated[:_NUM_PICTURES]])),
        }

    def _baselines(self, training: Sequence[Item], condition: Tensor) -> dict[str, Tensor]:
        """Return the baselines without a network, each as images (N, 1, e, e, e) for the conditions (N, 3, e,
        e, e): the mean training image, and a polynomial that is fitted to training cases."""
        num_cases = self.config.num_evaluated(max(1, _MAX_BASELINE_VOXELS // self.config.edge**3))
        data = self.decoded(training[:num_cases])
        quadratic = VoxelwiseQuadratic(zip(data["condition"].split(1), data["target"].split(1), strict=True))
        return {
            "mean image": data["target"].mean(dim=0).expand(len(condition), -1, -1, -1, -1),
            "voxelwise quadratic": torch.cat([quadratic(one) for one in condition.split(1)]),
        }

    # ---- new data ----

    def new_samples(self, data: str) -> tuple[Sequence[Item], list[str]]:
        """Return the samples for `predict`, and a line for each problem. `data` is 'phantoms', for generated
        heads that training has not seen, or a folder of cases, which need not have the target modality."""
        if data == "phantoms":
            return prediction.new_heads(self.config.num_phantoms), []
        needed = [name for name in MODALITIES if name != self.config.target]
        cases, problems = files.find_cases(Path(data).expanduser(), needed)
        return [{**as_item(case), "name": case.name} for case in cases], problems

    def predict(self, model: nn.Module, device: torch.device, sample: Item, stem: Path) -> Predicted:
        """Sample the modality of a case and write it on the case's grid. The case's row of the table has the
        `quality` too if the case has the true modality."""
        target, numbers = self.config.target, [prediction.noise_number(str(sample["name"]))]
        data = self.decoded([sample], with_masks=True)
        image = self._sampled(model, device, data["condition"], numbers)[0]
        if "generated" in sample:
            predicted = prediction.write_generated(target, image, stem)
        else:
            case = _case(sample)
            given = {name: one for name, one in files.modalities(case).items() if name != target}
            cube = self._prepare().brain_cube({name: one.image for name, one in given.items()})
            predicted = prediction.write_prediction(case, given, target, cube, image, stem)
        if "target" not in data:
            return predicted
        (measures,) = quality(image[None], data["target"], data["brain"], data.get("label"))
        return replace(predicted, values={**measures, **predicted.values})

    def _pictures(self, data: dict[str, Tensor], sampled: Tensor) -> dict[str, str]:
        """Draw the middle slices of the first cases: the given modalities, the true and the sampled one, and
        the error. Return {caption: PNG as a data URI}.

        Args:
            data: the batch of `decoded`.
            sampled: the middle slices of the sampled images, (N, D, H).
        """
        shown = slice(0, _NUM_PICTURES)
        condition, target = data["condition"][shown], data["target"][shown, 0]
        middle = target[..., target.shape[-1] // 2]
        given = [name for name in MODALITIES if name != self.config.target]
        return {
            **{
                f"given: {name}": side_by_side.middle_slices_uri(condition[:, i], _INTENSITY)
                for i, name in enumerate(given)
            },
            f"true {self.config.target}": side_by_side.middle_slices_uri(target, _INTENSITY),
            f"sampled {self.config.target}": side_by_side.row_of_slices_uri(sampled, _INTENSITY),
            f"absolute error of the {self.config.target}": side_by_side.row_of_slices_uri(
                (sampled - middle).abs(), _ERROR
            ),
        }


def _compare_with_best(
    table: Mapping[str, Mapping[str, float]], rows: Mapping[str, Sequence[Mapping[str, float]]]
) -> str:
    """Return a predicate that compares the sampled images with the best baseline, in each of the three
    measures over the brain, with 95 % intervals over cases.

    Args:
        table: the means over the cases, by method and measure.
        rows: the measures of each case, by method.
    """
    if sentence := verdict.too_few(len(rows["diffusion"]), "cases"):
        return f"has the values of the table. {sentence}"
    parts = []
    for name, measure, best_of, digits in (
        ("PSNR", "psnr_db", max, 1),
        ("SSIM", "ssim", max, 3),
        ("spectrum", "spectrum_db", min, 1),
    ):
        baselines = {method: row[measure] for method, row in table.items() if method != "diffusion"}
        best = best_of(baselines, key=baselines.__getitem__)
        pairs = zip(rows["diffusion"], rows[best], strict=True)
        low, high = verdict.mean_interval([one[measure] - other[measure] for one, other in pairs])
        difference = table["diffusion"][measure] - baselines[best]
        unit = " dB" if measure.endswith("db") else ""
        interval = f"95 % interval {low:+.{digits}f} to {high:+.{digits}f}"
        if low <= 0 <= high:
            parts.append(f"not to be told in {name} from '{best}' ({interval}{unit})")
        else:
            kind = "better" if (difference < 0) == (best_of is min) else "worse"
            parts.append(f"{abs(difference):.{digits}f}{unit} {kind} in {name} than '{best}' ({interval})")
    return f"is {', '.join(parts[:-1])} and {parts[-1]}"


def as_item(case: Case) -> Item:
    """Return a case as an Item. The paths are its values by modality, so that a cache on the disk notices a
    changed file."""
    place = {"name": str(case.folder / case.name), "case": case.name, "folder": str(case.folder)}
    return {**place, **case.files}


def _case(item: Item) -> Case:
    """Return the case of an Item made by `as_item`."""
    paths = {kind: item[kind] for kind in (*MODALITIES, "seg") if kind in item}
    return Case(item["case"], Path(item["folder"]), paths)


class _Look(Transform):
    """Reads the files of an Item completely. Raises DataError with a line for each unusable one."""

    def __call__(self, item: Item) -> dict[str, Tensor]:
        if problems := files.voxel_problems(_case(item)):
            raise DataError("\n".join(problems))
        return {}


@dataclass(eq=False)
class _Prepare(Transform):
    """Turns an Item into `condition` (3, e, e, e), `target` (1, e, e, e) if the case has this modality, and
    with masks also into `brain` and, if the case is labelled, `label` (1, e, e, e)."""

    target: str
    edge: int
    fit: str
    seed: int
    with_masks: bool

    def __call__(self, item: Item) -> dict[str, Tensor]:
        """Generate a head or read a case, and split its modalities into the condition and the target."""
        if "generated" in item:
            images = phantom(self.edge, self.seed, item["generated"], clean=self.target)
        else:
            images = self._read(item)
        prepared = {"condition": torch.cat([images[name] for name in MODALITIES if name != self.target])}
        if self.target in images:
            prepared["target"] = images[self.target]
        if self.with_masks:
            prepared |= {name: images[name] for name in ("brain", "label") if name in images}
        return prepared

    def _read(self, item: Item) -> dict[str, Tensor]:
        """Read a case's files and cut the same cube (1, e, e, e) out of each modality, of the brain's mask
        and of the labels."""
        case = _case(item)
        volumes = files.images(case)
        label = files.label(case)
        cube = self.brain_cube({name: image for name, image in volumes.items() if name != self.target})
        images = {name: cube.cut(image, -1.0, "trilinear") for name, image in volumes.items()}
        # Voxels outside the brain are 0 in all files, which is -1 here. The darkest hundredth of the brain is
        # -1 too, but a voxel is hardly among it in all modalities.
        brain = (torch.cat(list(volumes.values())) > -1).any(dim=0, keepdim=True)
        images["brain"] = cube.cut(brain.float(), 0.0, "nearest")
        if label is not None:
            images["label"] = cube.cut(label.float(), 0.0, "nearest").long()
        return images

    def brain_cube(self, given: Mapping[str, Tensor]) -> Cube:
        """Return the cube around the brain in the given modalities, each (1, D, H, W).

        The target must not be among them: a new case may lack it, and would get another cube than in
        training.
        """
        return Cube.around(torch.cat(list(given.values())), self.edge, self.fit)
