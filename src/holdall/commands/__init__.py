"""Commands that combine several packages, one file a command: plan, simulate, inspect, doctor, demo."""
