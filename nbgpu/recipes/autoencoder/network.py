"""MONAI's AutoencoderKL with the settings of a run."""

from __future__ import annotations

from monai.networks.nets import AutoencoderKL
from torch import nn

from nbgpu.recipes.autoencoder.config import AutoencoderConfig


def build_network(config: AutoencoderConfig) -> AutoencoderKL:
    """Return the network with random weights.

    By default GroupNorm has one group, which preserves the relative brightness of the channels: with 4 groups
    the result was 0.7 dB worse on the phantoms after 300 steps, with 8 groups 1.2 dB.
    """
    network = AutoencoderKL(
        spatial_dims=3,
        in_channels=config.num_image_channels,
        out_channels=config.num_image_channels,
        channels=config.channels,
        num_res_blocks=config.res_blocks,
        attention_levels=config.attention,
        latent_channels=config.latent_channels,
        norm_num_groups=config.norm_groups,
        with_encoder_nonlocal_attn=config.with_encoder_nonlocal_attn,
        with_decoder_nonlocal_attn=config.with_decoder_nonlocal_attn,
        # It goes through scaled_dot_product_attention, whose kernel `sdpa` chooses; the weights are the same.
        use_flash_attention=True,
    )
    if config.upsampling == "trilinear":
        for module in network.decoder.modules():
            if isinstance(module, nn.Upsample):
                module.mode, module.align_corners = "trilinear", False
    return network
