"""Configuration files of other tools, turned into nbgpu's settings.

Every key of such a file becomes a setting or is listed, with the reason.
"""
