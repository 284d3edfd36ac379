"""What the Mosaic GPU kernels of all cores share."""
