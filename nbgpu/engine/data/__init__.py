"""Data of a run: which samples a rank reads when, decoded, augmented, and in batches."""
