"""What tells iovisor's bcc from others of its name."""
