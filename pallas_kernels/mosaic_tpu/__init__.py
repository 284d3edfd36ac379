"""Parts shared by the Mosaic TPU kernels of all cores."""
