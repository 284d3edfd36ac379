"""What the Mosaic TPU kernels of all cores share."""
