"""The recipe: a network that removes noise from one modality of a brain, given the other three."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from monai.networks.nets import DiffusionModelUNet
from monai.transforms import Compose, ResizeWithPadOrCrop, SpatialPad, Transform
from monai.transforms.utils import generate_spatial_bounding_box
from monai.utils import convert_to_tensor
from torch import Tensor, nn
from torch.nn import functional

from nbgpu.config import DiffusionConfig
from nbgpu.engine.data import inspection
from nbgpu.engine.data.augmentation import augmentation
from nbgpu.engine.data.decoding import Decode, Item, opened, raise_together
from nbgpu.engine.data.loader import SampleLoader
from nbgpu.engine.data.parts import Parts, split
from nbgpu.engine.data.sampling import Draw
from nbgpu.engine.model.precision import at_least_float32
from nbgpu.engine.workload.recipe import CPU, Batch, Loaders
from nbgpu.errors import DataError
from nbgpu.recipes import data_uri
from nbgpu.recipes.diffusion import files
from nbgpu.recipes.diffusion.baselines import VoxelwiseQuadratic, mean_image
from nbgpu.recipes.diffusion.files import MODALITIES, Case
from nbgpu.recipes.diffusion.phantoms import phantom
from nbgpu.recipes.diffusion.sampler import Sampler
from nbgpu.recipes.diffusion.schedules import antithetic
from nbgpu.recipes.image_quality import psnr_db, ssim

_MAX_BASELINE_VOXELS = 2**24
"""The largest number of voxels of the training cases to which baselines are fitted."""
_NUM_PICTURES = 6


class Diffusion:
    """Trains MONAI's DiffusionModelUNet with the mean squared error of its prediction.

    Data (`config.data`): generated heads, or a folder of BraTS (`files`). Whole patients are held out.
    """

    def __init__(self, config: DiffusionConfig) -> None:
        self.config = config
        self.sampler = Sampler(config)

    # ---- data ----

    def build_loaders(self, rank: int, world_size: int, device: torch.device = CPU) -> Loaders:
        """Return the rank's volumes: `condition` (batch_size, 3, e, e, e), `target` (batch_size, 1, e, e, e),
        from -1 to 1.

        Raises DataError with a line for every problem of the files, including their voxels (`check_voxels`).
        """
        config = self.config
        self._inspect(rank, world_size, are_read_anyhow=inspection.are_read_anyhow(config))
        parts = self.parts()
        batches = []
        numbers = range(min(len(parts.validation), config.val_cases))[rank::world_size]
        for start in range(0, len(numbers), config.batch_size):
            chosen = numbers[start : start + config.batch_size]
            data = self.decoded([parts.validation[number] for number in chosen])
            batches.append(
                {
                    "condition": data["condition"],
                    "target": data["target"],
                    "number": torch.tensor(list(chosen)),
                }
            )
        both = ("condition", "target")
        draw = Draw(both, augment=augmentation(config, both, (config.edge,) * 3))
        return SampleLoader(
            parts.training, self._steps(), draw, config, rank=rank, world_size=world_size, device=device
        ).loaders(batches)

    def amount(self) -> tuple[int, int]:
        """Return the amount of data; only names and headers of files are read."""
        return len(self.parts().training), 1

    def parts(self) -> Parts:
        """Return the cases, with all of a patient in the same part.

        Raises DataError for bad names and headers.
        """
        config = self.config
        if config.data == "phantoms":
            return split([{"name": f"head {i}", "generated": i} for i in range(config.num_phantoms)], config)
        cases, problems = self._found
        if problems:
            raise DataError("\n".join(problems))
        in_order = sorted(cases, key=lambda case: case.patient)
        return split([as_item(case) for case in in_order], config, lambda item: _case(item).patient)

    @cached_property
    def _found(self) -> tuple[list[Case], list[str]]:
        return files.find_cases(Path(self.config.data).expanduser())

    def inspect(self) -> None:
        """Read all files completely. DataError has a line for each unusable one."""
        self._inspect(rank=0, world_size=1, are_read_anyhow=False)

    def _inspect(self, rank: int, world_size: int, are_read_anyhow: bool) -> None:
        if self.config.data == "phantoms":
            return
        cases, problems = self._found
        # After bad names or headers nothing else is checked.
        if problems or not are_read_anyhow:
            items = [as_item(case) for case in cases[rank::world_size]]
            problems = problems + inspection.problems(self.config, items, Compose([_Look()]))
        if problems:
            raise DataError("\n".join(problems))

    def _steps(self, with_label: bool = False) -> Compose:
        config = self.config
        return Compose([_Prepare(config.target, config.edge, config.fit, config.split_seed, with_label)])

    def decoded(self, items: Sequence[Item], with_label: bool = False) -> dict[str, Tensor]:
        """`condition` (N, 3, e, e, e), N >= 1, and if all have one `target` (N, 1, e, e, e) and `label` (N,
        1, e, e, e)."""
        decode = Decode(self._steps(with_label))
        decoded = [decode(item) for item in items]
        raise_together(decode.failures)
        names = [n for n in ("condition", "target", "label") if all(n in opened(one) for one in decoded)]
        return {name: torch.stack([one[name] for one in decoded]) for name in names}

    # ---- model and loss ----

    def build_model(self) -> nn.Module:
        """DiffusionModelUNet; its first input channel is the noisy image, the others are the condition."""
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
        """Noise."""
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
        times = torch.arange(config.num_times, device=device)
        if config.train_times == "sampled":
            times = torch.tensor(self.sampler.times.tolist(), device=device)
        if config.antithetic:
            t = times[antithetic(count, len(times), device)]
        else:
            t = times[torch.randint(len(times), (count,), device=device)]
        epsilon = torch.randn_like(clean)
        return {"loss": self._errors(model, batch, clean, epsilon, t).mean()}

    def _errors(self, model: nn.Module, batch: Batch, clean: Tensor, epsilon: Tensor, t: Tensor) -> Tensor:
        """Return the squared errors of the prediction, (N, 1, D, H, W)."""
        noise = self.sampler.noise
        x_t = noise.add(clean, epsilon, t)
        said = at_least_float32(model(torch.cat([x_t, batch["condition"]], dim=1), t))
        return (said - noise.target(self.config.prediction, clean, epsilon, t)).square()

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss`, with a fixed noise and time for each case, and `psnr_db` of its sample, shape
        (N,)."""
        numbers = batch["number"].long().tolist()
        _, epsilon, t = self.sampler.noisy(batch["target"], numbers)
        errors = self._errors(model, batch, batch["target"], epsilon, t)
        made = self.sampler(model, batch["condition"], numbers)
        return {
            "loss": errors.flatten(1).mean(dim=1),
            "psnr_db": psnr_db(_unit(made), _unit(batch["target"])),
        }

    # ---- result ----

    def samples_of_result(self) -> Sequence[int]:
        """Return the numbers of the held-out cases that the result is about."""
        return range(min(len(self.parts().reported), 2 * self.config.val_cases))

    def evaluate(
        self, model: nn.Module, device: torch.device, samples: Sequence[int]
    ) -> list[dict[str, dict[str, float]]]:
        """Return for each case the `quality` of what is sampled, and of what the network says at once."""
        held_out = self.parts().reported
        data = self.decoded([held_out[number] for number in samples], with_label=True)
        rows = {}
        for name, last in (("diffusion", 0), ("the network asked once", len(self.sampler.times) - 1)):
            made = self._sampled(model, device, data["condition"], samples, last)
            rows[name] = quality(made, data["target"], data.get("label"))
        return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]

    def _sampled(
        self, model: nn.Module, device: torch.device, condition: Tensor, numbers: Sequence[int], last: int = 0
    ) -> Tensor:
        """Return what is sampled for these cases, with the noise of their numbers, on the CPU."""
        dtype = next(model.parameters()).dtype
        return self.sampler(model, condition.to(device, dtype), list(numbers), last).float().cpu()

    def result(
        self,
        model: nn.Module,
        device: torch.device,
        evaluated: Sequence[dict[str, dict[str, float]]] | None = None,
    ) -> dict[str, Any]:
        """Return PSNR and SSIM of samples of held-out cases beside baselines: `table`, `cases`, `note` and
        `images`. `evaluated` is from `evaluate`."""
        config = self.config
        parts = self.parts()
        numbers = self.samples_of_result()
        held_out = parts.reported[: len(numbers)]
        if not held_out:
            return {"table": {}, "note": "Nothing was held out (val_fraction=0): no result.", "images": {}}
        if evaluated is None:
            chunks = [numbers[i : i + config.batch_size] for i in range(0, len(numbers), config.batch_size)]
            evaluated = [row for chunk in chunks for row in self.evaluate(model, device, chunk)]
        data = self.decoded(held_out, with_label=True)
        rows = {name: [row[name] for row in evaluated] for name in evaluated[0]}
        for name, output in self._baselines(parts.training, data["condition"]).items():
            rows[name] = quality(output, data["target"], data.get("label"))
        table = {name: _mean(of_cases) for name, of_cases in rows.items()}
        best_baseline = max(("mean image", "voxelwise quadratic"), key=lambda name: table[name]["psnr_db"])
        gain_db = table["diffusion"]["psnr_db"] - table[best_baseline]["psnr_db"]
        note = (
            f"On {len(held_out)} held-out cases {config.target} in {len(self.sampler.times)} steps is "
            f"{abs(gain_db):.1f} dB {'above' if gain_db > 0 else 'below'} the best baseline, '{best_baseline}'. "
            "Values go from -1 to 1, and PSNR and SSIM are for that range." + parts.in_words(config)
        )
        shown = slice(0, _NUM_PICTURES)
        cases = {str(item["name"]): row for item, row in zip(held_out, rows["diffusion"], strict=True)}
        return {
            "table": table,
            "cases": cases,
            "note": note,
            "images": self._pictures(
                data, self._sampled(model, device, data["condition"][shown], numbers[shown])
            ),
        }

    def _baselines(self, training: Sequence[Item], condition: Tensor) -> dict[str, Tensor]:
        num_cases = max(1, _MAX_BASELINE_VOXELS // self.config.edge**3)
        data = self.decoded(training[:num_cases])
        quadratic = VoxelwiseQuadratic(zip(data["condition"].split(1), data["target"].split(1), strict=True))
        return {
            "mean image": mean_image(data["target"]).expand(len(condition), -1, -1, -1, -1),
            "voxelwise quadratic": torch.cat([quadratic(one) for one in condition.split(1)]),
        }

    def _pictures(self, data: dict[str, Tensor], made: Tensor) -> dict[str, str]:
        shown = slice(0, _NUM_PICTURES)
        condition, target, found = data["condition"][shown], data["target"][shown, 0], made[:, 0]
        given = [name for name in MODALITIES if name != self.config.target]
        return {
            **{
                f"given: {name}": data_uri.middle_slices(condition[:, i], -1, 1)
                for i, name in enumerate(given)
            },
            f"true {self.config.target}": data_uri.middle_slices(target, -1, 1),
            f"sampled {self.config.target}": data_uri.middle_slices(found, -1, 1),
            "absolute error, black is 0 and white 1": data_uri.middle_slices((found - target).abs(), 0, 1),
        }


def quality(output: Tensor, target: Tensor, label: Tensor | None = None) -> list[dict[str, float]]:
    """`psnr_db` and `ssim` of each volume (N, 1, D, H, W), and `tumour_psnr_db` of its labelled voxels, if it
    has any."""
    output, target = _unit(output), _unit(target)
    rows = [
        {"psnr_db": round(float(psnr), 3), "ssim": round(float(similar), 4)}
        for psnr, similar in zip(psnr_db(output, target), ssim(output, target), strict=True)
    ]
    for index, row in enumerate(rows):
        if label is not None and (inside := label[index] > 0).any():
            both = output[index][inside], target[index][inside]
            row["tumour_psnr_db"] = round(float(psnr_db(both[0][None], both[1][None])), 3)
    return rows


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    found = {}
    for name in ("psnr_db", "ssim", "tumour_psnr_db"):
        if values := [row[name] for row in rows if name in row]:
            found[name] = round(sum(values) / len(values), 4)
    return found


def _unit(image: Tensor) -> Tensor:
    return (image + 1) / 2


def as_item(case: Case) -> Item:
    """Return the case's files by modality, so that a cache on disk notices a change."""
    place = {"name": str(case.folder / case.name), "case": case.name, "folder": str(case.folder)}
    return {**place, **case.files}


def _case(item: Item) -> Case:
    paths = {kind: item[kind] for kind in (*MODALITIES, "seg") if kind in item}
    return Case(item["case"], Path(item["folder"]), paths)


class _Look(Transform):
    """Reads the files of an Item completely. Raises DataError with a line for each unusable one."""

    def __call__(self, item: Item) -> dict[str, Tensor]:
        if problems := files.voxel_problems(_case(item)):
            raise DataError("\n".join(problems))
        return {}


class _Prepare(Transform):
    """An Item to `condition` (3, e, e, e), `target` (1, e, e, e) if it is there, and `label` (1, e, e, e) if
    it is asked for."""

    def __init__(self, target: str, edge: int, fit: str, seed: int, with_label: bool) -> None:
        self.target = target
        self.edge = edge
        self.fit = fit
        self.seed = seed
        self.with_label = with_label

    def __call__(self, item: Item) -> dict[str, Tensor]:
        if "generated" in item:
            images = phantom(self.edge, self.seed, item["generated"], clean=self.target)
        else:
            images = self._read(item)
        prepared = {"condition": torch.cat([images[name] for name in MODALITIES if name != self.target])}
        if self.target in images:
            prepared["target"] = images[self.target]
        if self.with_label and "label" in images:
            prepared["label"] = images["label"]
        return prepared

    def _read(self, item: Item) -> dict[str, Tensor]:
        case = _case(item)
        volumes = files.images(case)
        label = files.label(case)
        # Without the target, which a case to be sampled may lack: with it the box would differ.
        given = torch.cat([volume for name, volume in volumes.items() if name != self.target])
        box = generate_spatial_bounding_box(given, select_fn=lambda values: values > -1)
        cut = (slice(None), *(slice(start, end) for start, end in zip(*box, strict=True)))
        images = {name: self._fitted(one[cut], -1.0, "trilinear") for name, one in volumes.items()}
        if label is not None:
            images["label"] = self._fitted(label[cut].float(), 0.0, "nearest").long()
        return images

    def _fitted(self, volume: Tensor, background: float, mode: str) -> Tensor:
        """(C, D, H, W) -> (C, e, e, e)."""
        if self.fit == "crop":
            return _plain(ResizeWithPadOrCrop(self.edge, constant_values=background)(volume))
        cube = _plain(SpatialPad(max(volume.shape[1:]), value=background)(volume))
        return functional.interpolate(cube[None], size=(self.edge,) * 3, mode=mode)[0]


def _plain(image: Any) -> Tensor:
    tensor: Tensor = convert_to_tensor(image, track_meta=False)
    return tensor
