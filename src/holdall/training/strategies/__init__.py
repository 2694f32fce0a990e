"""Where tables live while training: one file per strategy."""
