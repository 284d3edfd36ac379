"""Parts shared by the Mosaic GPU kernels of all cores."""
