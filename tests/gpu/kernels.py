"""What lithography and microstructure compute: on the GPU, on the CPU, and beside the bandwidth of a copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from checks import Place, check
from machine import copy_bytes_per_s, seconds_of


def _bandwidth(place: Place, num_bytes: float, taken_s: float, name: str) -> None:
    """Note the bytes that a computation must move at least, as a share of what a copy moves in that time."""
    copied = copy_bytes_per_s(place.device, place.size(2**31, 2**23))
    place.figure(f"{name}: bytes that must be moved", num_bytes / 1e9, "GB")
    place.figure(f"{name}: share of the bandwidth of a copy", 100 * num_bytes / taken_s / copied, "%")


def _beside_cpu(place: Place, work: Callable[[str], Any], name: str) -> tuple[Any, Any, float]:
    """Do some work on the device and on the CPU, and note the seconds.

    Returns what each gave, and the seconds on the device.
    """
    found = work(place.device)
    here_s = seconds_of(lambda: work(place.device), place.device)
    began_s = time.perf_counter()
    expected = work("cpu")
    cpu_s = time.perf_counter() - began_s
    place.figure(f"{name}: on the device", 1e3 * here_s, "ms")
    place.figure(f"{name}: on the CPU", 1e3 * cpu_s, "ms")
    place.figure(f"{name}: CPU / device", cpu_s / here_s)
    return found, expected, here_s


@check(
    "lithography: images by Abbe and by SOCS equal the CPU's, forward and backward; times beside the CPU and a copy",
    slice=4,
    page="benchmarks",
    shows=("recipes/lithography/imaging.py", "recipes/lithography/pupil.py"),
    budget_s=15,
    alone=True,
    seldom=False,
)
def lithography(place: Place) -> None:
    import torch

    from nbgpu.recipes.lithography.imaging import abbe, socs
    from nbgpu.recipes.lithography.pupil import Optics
    from nbgpu.recipes.lithography.sources import Source

    edge, num_masks = place.size((1024, 16), (64, 2))
    # Wide pixels would be imaged on the same coarse grid.
    pixel_nm = 8.0
    masks = (torch.rand(num_masks, edge, edge, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    exact = abbe(Optics(), Source().points(), (edge, edge), pixel_nm)
    place.figure("masks", f"{num_masks} of {edge} x {edge}")
    place.figure("source points", len(exact.systems))
    place.figure("coarse grid", " x ".join(map(str, exact.systems.shape[1:])))
    imagers = {
        "Abbe": exact.to(torch.complex64),
        "SOCS, 24 kernels": socs(exact, 24).to(torch.complex64),
    }
    on_device = masks.to(place.device)
    for name, imager in imagers.items():
        of_place = {"cpu": imager, place.device: imager.to(torch.device(place.device))}
        data = {"cpu": masks, place.device: on_device}

        def both_passes(where: str, of_place: Any = of_place, data: Any = data) -> Any:
            mask = data[where].detach().requires_grad_()
            image = of_place[where](mask)
            image.square().sum().backward()
            return image.detach(), mask.grad

        wide = imager.to(torch.complex128)(masks[:1].double())
        (image, gradient), (expected, expected_gradient), taken_s = _beside_cpu(place, both_passes, name)
        for what, found, wanted in (
            ("image", image, expected),
            ("gradient", gradient, expected_gradient),
        ):
            off = float((found.cpu() - wanted).norm() / wanted.norm())
            place.figure(f"{name}: {what} differs from the CPU's by", off)
            assert off < 1e-4, f"{name}: the {what} is off by {off:.3g}"
        off = float((image[:1].cpu().double() - wide).norm() / wide.norm())
        place.figure(f"{name}: image differs from complex128 by", off)
        assert off < 1e-4
        # Each mask and image, and each field of the forward pass, written and read in both passes.
        h, w = imager.systems.shape[1:]
        num_bytes = 4 * masks.numel() * 4 + 4 * num_masks * len(imager.systems) * h * w * 8
        _bandwidth(place, num_bytes, taken_s, name)


def _microstructure(name: str, full_edge: int, full_reach: int) -> Callable[[Place], None]:
    def evaluate_on_both(place: Place) -> None:
        import torch

        from nbgpu.recipes.microstructure.characterize import characterize
        from nbgpu.recipes.microstructure.losses import Loss
        from nbgpu.recipes.microstructure.measure import Measure
        from nbgpu.recipes.microstructure.objective import Objective
        from nbgpu.recipes.microstructure.sample import micrograph

        edge, reach = place.size((full_edge, full_reach), (16, 4))
        how, weights = Measure(reach), {name: 1.0, "Variation": 1.0}
        picture = micrograph((edge, edge), 2.0, [0.35], seed=1).double()[None]
        generator = torch.Generator().manual_seed(0)
        field = torch.rand(1, edge, edge, edge, dtype=torch.float64, generator=generator)
        place.figure("field", f"{edge}^3 in float64, limit_to={reach}")
        target = characterize(picture, [*weights], how, multigrid=False)

        def evaluate(where: str) -> Any:
            moved = {key: tensor.to(where) for key, tensor in target.items()}
            objective, data = Objective(Loss([moved], weights, how)), field.to(where)
            return lambda: objective(data)

        evaluations = {where: evaluate(where) for where in {"cpu", place.device}}
        here, on_cpu, taken_s = _beside_cpu(place, lambda where: evaluations[where](), name)
        loss, gradient = (torch.as_tensor(value).cpu() for value in here)
        expected, expected_gradient = (torch.as_tensor(value) for value in on_cpu)
        off = float(abs(loss - expected) / abs(expected))
        place.figure("loss differs from the CPU's by", off)
        assert off < 1e-9, f"the loss is off by {off:.3g}"
        off = float((gradient - expected_gradient).norm() / expected_gradient.norm())
        place.figure("gradient differs from the CPU's by", off)
        assert off < 1e-8, f"the gradient is off by {off:.3g}"
        # The field is read and its gradient written, in each of the three directions.
        _bandwidth(place, 3 * 2 * 8 * edge**3, taken_s, name)

    return evaluate_on_both


for _called, _name, _edge, _reach in (
    ("microstructure", "FFTCorrelations", 128, 16),
    # On a CPU it takes minutes for a field of 128^3.
    ("microstructure_correlations", "Correlations", 64, 8),
):
    check(
        f"microstructure, {_name} of {_edge}^3: loss and gradient equal the CPU's; times beside the CPU and a copy",
        slice=4,
        page="benchmarks",
        shows=tuple(f"recipes/microstructure/{file}.py" for file in ("losses", "measure", "objective")),
        budget_s=15,
        alone=True,
        seldom=False,
        name=_called,
    )(_microstructure(_name, _edge, _reach))
