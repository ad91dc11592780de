"""Who had a kernel address, and when. Pure: no file, no system call."""
