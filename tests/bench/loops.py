"""The autoencoder's training as one would write it by hand, with plain torch and with two libraries for it.

    torchrun --nproc-per-node=2 tests/bench/loops.py {plain,fabric,accelerate} VOLUMES.pt BATCH_SIZE STAMPS

They train without an end; rank 0 leaves the time of each step in the file STAMPS.
"""

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
Prepared = tuple[Any, Any, Any, Callable[[Tensor], Any], Callable[[], Any]]
"""Model, optimizer, loader, backward and the clipping of the gradient."""


def plain(model: Any, optimizer: Any, data: TensorDataset, batch_size: int) -> Prepared:
    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    loader = DataLoader(data, batch_size, sampler=DistributedSampler(data), drop_last=True)
    clip = lambda: torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)  # noqa: E731
    return replica, optimizer, loader, lambda loss: loss.backward(), clip


def fabric(model: Any, optimizer: Any, data: TensorDataset, batch_size: int) -> Prepared:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    library = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    library.launch()
    replica, optimizer = library.setup(model, optimizer)
    loader = library.setup_dataloaders(DataLoader(data, batch_size, shuffle=True, drop_last=True))
    clip = lambda: library.clip_gradients(replica, optimizer, max_norm=1.0)  # noqa: E731
    return replica, optimizer, loader, library.backward, clip


def accelerate(model: Any, optimizer: Any, data: TensorDataset, batch_size: int) -> Prepared:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    library = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    loader = DataLoader(data, batch_size, shuffle=True, drop_last=True)
    replica, optimizer, loader = library.prepare(model, optimizer, loader)
    clip = lambda: library.clip_grad_norm_(replica.parameters(), 1.0)  # noqa: E731
    return replica, optimizer, loader, library.backward, clip


def main(who: str, volumes: str, batch_size: int, stamps: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoencoderKL(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        channels=(8, 16),
        num_res_blocks=(1, 1),
        attention_levels=(False, False),
        latent_channels=2,
        norm_num_groups=1,
        with_encoder_nonlocal_attn=False,
        with_decoder_nonlocal_attn=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = TensorDataset(torch.load(volumes, weights_only=True))
    prepare = {"plain": plain, "fabric": fabric, "accelerate": accelerate}[who]
    replica, optimizer, loader, backward, clip = prepare(model, optimizer, data, batch_size)
    # The libraries set it anew.
    torch.set_num_threads(1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        getattr(optimizer, "optimizer", optimizer), lambda step: 1 - step / SCHEDULED_STEPS
    )
    file = Path(stamps).open("ab", buffering=0)  # noqa: SIM115 - until it is killed
    while True:
        for (image,) in loader:
            if dist.get_rank() == 0:
                file.write(struct.pack("d", time.monotonic()))
            reconstruction, mean, sigma = replica(image)
            log_variance = 2 * sigma.log()
            kl = 0.5 * (mean**2 + sigma**2 - log_variance - 1).sum(dim=(1, 2, 3, 4)).mean()
            loss = functional.mse_loss(reconstruction, image) + 1e-7 * kl
            backward(loss)
            clip()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            schedule.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
