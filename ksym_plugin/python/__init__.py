"""Python stacks: py-spy's, with the kernel's frames under them."""
