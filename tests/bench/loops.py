"""The autoencoder's training as one would write it by hand, with plain torch and with two libraries for it.

    torchrun --nproc-per-node=2 tests/bench/loops.py {plain,fabric,accelerate} VOLUMES.pt BATCH_SIZE STAMPS \\
        [CHANNELS] [cpu|cuda] [off|bf16]

They train without an end; rank 0 leaves the time of each step in the file STAMPS. CHANNELS is as in '8,16'.
"""

import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from monai.networks.nets import AutoencoderKL
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SCHEDULED_STEPS = 1_000_000
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
Prepared = tuple[Any, Any, Any, Callable[[Tensor], Any], Callable[[], Any]]
"""Model, optimizer, loader, backward and the clipping of the gradient."""


def plain(model: Any, optimizer: Any, data: TensorDataset, batch_size: int, kind: str, amp: bool) -> Prepared:
    dist.init_process_group(BACKENDS[kind])
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True, pin_memory=kind == "cuda")
    clip = lambda: torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)  # noqa: E731
    return replica, optimizer, loader, lambda loss: loss.backward(), clip


def fabric(
    model: Any, optimizer: Any, data: TensorDataset, batch_size: int, kind: str, amp: bool
) -> Prepared:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=BACKENDS[kind], gradient_as_bucket_view=True)
    library = Fabric(
        accelerator=kind,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        precision="bf16-mixed" if amp else "32-true",
    )
    library.launch()
    replica, optimizer = library.setup(model, optimizer)
    loader = library.setup_dataloaders(
        DataLoader(data, batch_size, shuffle=True, drop_last=True, pin_memory=kind == "cuda")
    )
    clip = lambda: library.clip_gradients(replica, optimizer, max_norm=1.0)  # noqa: E731
    return replica, optimizer, loader, library.backward, clip


def accelerate(
    model: Any, optimizer: Any, data: TensorDataset, batch_size: int, kind: str, amp: bool
) -> Prepared:
    if kind == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator, DistributedDataParallelKwargs

    kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    library = Accelerator(
        cpu=kind == "cpu", mixed_precision="bf16" if amp else "no", kwargs_handlers=[kwargs]
    )
    loader = DataLoader(data, batch_size, shuffle=True, drop_last=True, pin_memory=kind == "cuda")
    replica, optimizer, loader = library.prepare(model, optimizer, loader)
    clip = lambda: library.clip_grad_norm_(replica.parameters(), 1.0)  # noqa: E731
    return replica, optimizer, loader, library.backward, clip


def main(
    who: str,
    volumes: str,
    batch_size: int,
    stamps: str,
    channels: str = "8,16",
    kind: str = "cpu",
    amp: str = "off",
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    num_channels = [int(number) for number in channels.split(",")]
    model = AutoencoderKL(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        channels=num_channels,
        num_res_blocks=[1] * len(num_channels),
        attention_levels=[False] * len(num_channels),
        latent_channels=2,
        norm_num_groups=1,
        with_encoder_nonlocal_attn=False,
        with_decoder_nonlocal_attn=False,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = TensorDataset(torch.load(volumes, weights_only=True))
    prepare = {"plain": plain, "fabric": fabric, "accelerate": accelerate}[who]
    replica, optimizer, loader, backward, clip = prepare(
        model, optimizer, data, batch_size, kind, amp == "bf16"
    )
    # The libraries compute in bf16 by themselves.
    autocast = torch.autocast(kind, torch.bfloat16, enabled=amp == "bf16" and who == "plain")
    # The libraries set it again.
    torch.set_num_threads(1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        getattr(optimizer, "optimizer", optimizer), lambda step: 1 - step / SCHEDULED_STEPS
    )
    file = Path(stamps).open("ab", buffering=0)  # noqa: SIM115 - until it is killed
    while True:
        for (image,) in loader:
            if dist.get_rank() == 0:
                file.write(struct.pack("d", time.monotonic()))
            image = image.to(device, non_blocking=True)
            with autocast:
                reconstruction, mean, sigma = replica(image)
            mean, sigma = mean.float(), sigma.float()
            log_variance = 2 * sigma.log()
            kl = 0.5 * (mean**2 + sigma**2 - log_variance - 1).sum(dim=(1, 2, 3, 4)).mean()
            loss = functional.mse_loss(reconstruction.float(), image) + 1e-7 * kl
            backward(loss)
            clip()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            schedule.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
