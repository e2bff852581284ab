"""The data of a run: which samples a rank reads when, how they are decoded and augmented, and their
batches."""
