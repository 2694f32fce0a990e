"""Commands that look at every kind of artifact: inspect, doctor, demo."""
