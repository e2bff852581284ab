"""The scaling of training over ranks: measurements and models. Without torch."""
