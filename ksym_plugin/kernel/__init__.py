"""Reading this kernel: one reader for each of its interfaces."""
