"""Measured rates of a machine, as hardware.json holds them."""
