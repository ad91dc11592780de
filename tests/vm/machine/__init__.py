"""Stock Debian kernels under QEMU: an image made once, guests that run one job each."""
