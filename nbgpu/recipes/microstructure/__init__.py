"""Microstructure characterization and reconstruction: measure statistical descriptors of a microstructure,
and search for a field with the same descriptors.

After Seibert et al., "Microstructure Characterization and Reconstruction in Python: MCRpy" (IMMI 2022,
10.1007/s40192-022-00273-4), and "Descriptor-based reconstruction of three-dimensional microstructures through
gradient-based optimization" (Acta Materialia 2022, 10.1016/j.actamat.2022.117667).

A field is a float64 tensor with the phases as its first axis: (P, H, W) or (P, D, H, W). P is 1 if only the
share of the second of two phases is kept.
"""
