"""Every way to store one embedding table, one file per method."""
