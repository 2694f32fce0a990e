"""Commands that combine several packages, one file per command: plan, simulate, inspect, doctor, demo."""
