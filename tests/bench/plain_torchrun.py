"""The autoencoder's training in plain torch, as one would write it by hand: the measure for our trainer.

    torchrun --nproc-per-node=2 tests/bench/plain_torchrun.py STEPS BATCH_SIZE

Prints the steps per second of rank 0 after the first `WARM_UP_STEPS`.
"""

import sys
import time

import torch
import torch.distributed as dist
from monai.networks.nets import AutoencoderKL
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nbgpu.recipes.phantoms import phantom

WARM_UP_STEPS = 20
PATCH_SIZE = 16
NUM_PHANTOMS = 128


def main(steps: int, batch_size: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        AutoencoderKL(
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
        ),
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    volumes = torch.stack([torch.as_tensor(phantom(PATCH_SIZE, 0, i)) for i in range(NUM_PHANTOMS)])
    data = TensorDataset(volumes.reshape(NUM_PHANTOMS, 1, PATCH_SIZE, PATCH_SIZE, PATCH_SIZE).float())
    loader = DataLoader(data, batch_size, sampler=DistributedSampler(data), drop_last=True)
    step = 0
    while step < steps:
        for (image,) in loader:
            if step == WARM_UP_STEPS:
                started_s = time.perf_counter()
            reconstruction, mean, sigma = model(image)
            log_variance = 2 * sigma.log()
            kl = 0.5 * (mean**2 + sigma**2 - log_variance - 1).sum(dim=(1, 2, 3, 4)).mean()
            loss = functional.l1_loss(reconstruction, image) + 1e-7 * kl
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            schedule.step()
            step += 1
            if step == steps:
                break
    if dist.get_rank() == 0:
        print((steps - WARM_UP_STEPS) / (time.perf_counter() - started_s))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
