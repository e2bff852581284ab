"""Microstructures: describe them with statistics, and find a field with the statistics of a given one.

After Seibert et al., "Microstructure Characterization and Reconstruction in Python: MCRpy" (IMMI 2022,
10.1007/s40192-022-00273-4), and "Descriptor-based reconstruction of three-dimensional microstructures through
gradient-based optimization" (Acta Materialia 2022, 10.1016/j.actamat.2022.117667).

A field is a tensor of float64 with its phases first: (P, H, W) or (P, D, H, W), P = 1 where only the share of
the second of two phases is kept.
"""
